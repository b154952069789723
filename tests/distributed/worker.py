"""Fits of several processes, in one process group: what each rank of :mod:`test_data_parallel` runs.

    python worker.py FOLDER SCENARIO...

writes to ``FOLDER/RANK.pt`` what each scenario has found.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import scenarios
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_ort import ORTPrecision, ORTStrategy
from lightning_ort.distributed import adasum, adasum_hook
from lightning_ort.distributed.sync_batchnorm import SyncBatchNorm
from lightning_ort.lightning.steps import CompiledSteps
from lightning_ort.report import StepReport

STEPS = 50


class Images(LightningModule):
    """Convolutions between batch normalizations, whose buffers are those of rank 0 in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
            nn.Conv2d(6, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, sync_dist=True)
        gathered = self.all_gather(logits.detach().mean())
        self.log("mean", gathered.mean())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Text(LightningModule):
    """A transformer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        tokens = (x.flatten(1)[:, :12] * 3).long().abs() % 20
        return F.cross_entropy(self.head(self.layer(self.embedding(tokens)).mean(1)), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Recurrent(LightningModule):
    """Rows of the images, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 10, batch_first=True), nn.Linear(10, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.head(self.lstm(x[:, 0])[0][:, -1]), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5)


class Adversaries(LightningModule):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 36))
        self.discriminator = nn.Sequential(nn.Linear(36, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        real = batch[0].flatten(1)
        of_generator, of_discriminator = self.optimizers()
        noise = real[:, :4]
        fake = self.generator(noise)
        loss = F.softplus(-self.discriminator(fake)).mean()
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()
        judged = F.softplus(-self.discriminator(real)) + F.softplus(self.discriminator(self.generator(noise).detach()))
        of_discriminator.zero_grad()
        self.manual_backward(judged.mean())
        of_discriminator.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.generator, self.discriminator)]


class Scale(Callback):
    """The loss scale after each step, and the steps that were left out."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        plugin = trainer.precision_plugin
        if isinstance(plugin, ORTPrecision):
            self.seen.append((plugin.scaling.scale, plugin.skipped_steps))


class Thawed(Recurrent):
    """The recurrent layer is frozen when the processes begin, and trained from the second epoch on."""

    def configure_callbacks(self):
        class Thaw(BaseFinetuning):
            def freeze_before_training(self, module):
                self.freeze(module.lstm)

            def finetune_function(self, module, epoch, optimizer):
                if epoch == 1:
                    self.unfreeze_and_add_param_group(module.lstm, optimizer, lr=0.5)

        return [Thaw()]

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), 0.5)


class Overflowing(Recurrent):
    """One rank meets a loss that is infinite in the third step."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.head(x.flatten(1)[:, :10]), y)
        return loss + self.head.bias.sum() * torch.where(x[0, 0, 0, 0] > 1e3, torch.inf, 0.0)


class Centred(Recurrent):
    """Ranks exchange tensors in the step: in place, as a list, and by an operator that Dynamo has in graphs."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.head(x.flatten(1)[:, :10]).tanh()
        centre = logits.detach().mean(0)
        dist.all_reduce(centre)
        everyones = [torch.empty_like(centre) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, logits.detach().amax(0))
        loss = F.cross_entropy(logits - centre / dist.get_world_size() + torch.stack(everyones).mean(0), y)
        return loss + funcol.all_reduce(logits.detach().square().mean(), "sum", dist.group.WORLD) * logits.mean()


def data(dtype: torch.dtype, rows: int = 256) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 1, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(x, (x.sum((1, 2, 3)) * 0.7).long() % 4)


def fit(kind: type, strategy: Any, *, precision: str = "64-true", dataset: Any = None, **flags: Any) -> Trainer:
    """Fit on this rank's share; the rows of a batch of all ranks are the same whatever their number."""
    seed_everything(1, verbose=False)
    module = kind()
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = dataset or data(torch.float64 if precision == "64-true" else torch.float32)
    sampler = DistributedSampler(rows, world, rank, shuffle=False)
    flags = {"max_steps": STEPS} | flags
    if hasattr(module, "validation_step") and kind is Images:
        flags["val_check_interval"] = 8
    trainer = Trainer(
        **scenarios.devices(), strategy=strategy, precision=precision, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, limit_val_batches=2, **flags,
    )  # fmt: skip
    loader = DataLoader(rows, 16 // world, sampler=sampler)
    trainer.fit(module, loader, DataLoader(rows, 16 // world, sampler=sampler) if kind is Images else None)
    return trainer


def outcome(trainer: Trainer) -> dict[str, Any]:
    module = trainer.lightning_module
    found = {name: tensor.clone().cpu() for name, tensor in module.state_dict().items()}
    return {**found, **{f"metric {k}": v.cpu() for k, v in trainer.callback_metrics.items()}}


def ours(**options: Any) -> ORTStrategy:
    return ORTStrategy(print_report=False, **options)


def compared(
    kind: type, *, precision: str = "64-true", unused: bool = False, eager: dict[str, Any] | None = None, **flags: Any
) -> dict[str, Any]:
    """Lightning's own strategy for several processes, unless what it finds is known, and this package's."""
    if eager is None:
        theirs = "ddp_find_unused_parameters_true" if unused else "ddp"
        eager = outcome(fit(kind, theirs, precision=precision, **flags))
    trainer = fit(kind, ours(find_unused_parameters=unused), precision=precision, **flags)
    report = trainer.strategy.report().step("training_step")
    return {"eager": eager, "ort": outcome(trainer), "graphs": report.graphs, "calls": report.calls}


def synced(**flags: Any) -> dict[str, Any]:
    """Statistics of all ranks."""
    return {"ort": outcome(fit(Images, ours(), sync_batchnorm=True, **flags))}


def thawed() -> dict[str, Any]:
    found = {"ort": outcome(fit(Thawed, ours())), "sharded": outcome(fit(Thawed, ours(shard_optimizer=True)))}
    powersgd = {
        "ddp_comm_state": powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=3),
        "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
    }
    return {**found, "powersgd": outcome(fit(Thawed, ours(**powersgd), precision="32-true"))}


def own_statistics() -> dict[str, Any]:
    """A layer without running statistics, in evaluation, of this rank's rows."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    layer = SyncBatchNorm(4, track_running_stats=False).eval()
    return {"ort": layer(x).detach(), "eager": nn.BatchNorm1d(4, track_running_stats=False)(x).detach()}


class Alone(Recurrent):
    """Each process is a group of its own, of which the weights are averaged."""

    def setup(self, stage):
        self.trainer.strategy._ddp_comm_state.subgroup, _ = dist.new_subgroups(group_size=1)


def hooks() -> dict[str, Any]:
    found = {"plain": outcome(fit(Recurrent, ours()))}
    for name, options in {
        "float16": {"ddp_comm_hook": default_hooks.fp16_compress_hook},
        "bfloat16": {"ddp_comm_hook": default_hooks.bf16_compress_hook},
        "powersgd": {
            "ddp_comm_state": powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=3),
            "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
        },
        "adasum": {"ddp_comm_hook": adasum_hook},
    }.items():
        found[name] = outcome(fit(Recurrent, ours(**options), precision="32-true"))
    for name, kind in {"local": Alone, "local, by machine": Recurrent}.items():
        options = {
            "ddp_comm_state": post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=2),
            "ddp_comm_hook": post_localSGD_hook.post_localSGD_hook,
            "model_averaging_period": 1,
        }
        found[name] = outcome(fit(kind, ours(**options), precision="32-true"))
    return found


class Noted(Recurrent):
    """Hooks of parameters exchange what arrives there, on one rank from two graphs."""

    def on_fit_start(self):
        self.handles = [p.register_hook(self.exchange) for p in self.parameters()]

    def exchange(self, gradient):
        everyones = [torch.empty(3, dtype=gradient.dtype) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, gradient.flatten()[:3])  # of weights and biases of any shape
        return gradient * (1 + torch.stack(everyones).square().mean()) + 1e-3 * torch.randn_like(gradient)

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.lstm(x[:, 0])[0][:, -1]
        if dist.get_rank():
            torch._dynamo.graph_break()
        return F.cross_entropy(self.head(h), y)


class AdasumByHand(Recurrent):
    """Gradients combined by the formula, parameter by parameter, after the step."""

    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            everyones = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(everyones, p.grad)
            p.grad.copy_(adasum(everyones))


def combined() -> dict[str, Any]:
    """Adasum as a hook, and after backward passes that are not reduced."""

    def nothing(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return {
        "eager": outcome(fit(AdasumByHand, ours(ddp_comm_hook=nothing), max_steps=10)),
        "ort": outcome(fit(Recurrent, ours(ddp_comm_hook=adasum_hook), max_steps=10)),
    }


def sharded(folder: Path) -> dict[str, Any]:
    """Optimizer states in parts, with learning rates that change; resumed without parts."""
    whole = fit(Text, ours(), accumulate_grad_batches=2)
    parts = fit(Text, ours(shard_optimizer=True), accumulate_grad_batches=2)
    images = fit(Images, ours(shard_optimizer=True))
    images.save_checkpoint(folder / "parts.ckpt")
    inner = getattr(images.optimizers[0], "optim", None)
    kept = sum(v.numel() for state in inner.state.values() for v in state.values() if torch.is_tensor(v))
    return {
        "eager": outcome(whole),
        "ort": outcome(parts),
        "kept": kept,
        "images": outcome(images),
        "whole images": outcome(fit(Images, ours())),
    }


def overflowing() -> dict[str, Any]:
    """Loss scaling: what one rank finds, all leave out."""
    rows = data(torch.float32)
    world = dist.get_world_size()
    rows.tensors[0][2 * 16 + world - 1, 0, 0, 0] = 1e4  # the last rank's first row of the third step
    seen = Scale()
    strategy = ours(find_unused_parameters=True)  # those of the recurrent layer
    options = {"plugins": [ORTPrecision("16-mixed")], "precision": None, "callbacks": [seen]}
    trainer = fit(Overflowing, strategy, dataset=rows, max_steps=8, **options)
    return {"ort": outcome(trainer), "scale": seen.seen}


def agreement() -> dict[str, Any]:
    """Who runs a graph is the same on all ranks, whatever each has measured."""
    from lightning_ort.compiler.choice import Choice
    from lightning_ort.compiler.contest import Key, Memory

    trainer = fit(Recurrent, ours(), max_steps=1)
    memory = Memory()
    strategy = trainer.strategy
    assert strategy.ranks is None, "the fit has ended"
    seen = []

    class Asking(Callback):
        def on_train_start(self, trainer, pl_module):
            memory.agreement = trainer.strategy.ranks.agreed
            for n in range(3):
                mine = Choice(("onnxruntime", "torch", "eager")[(n + trainer.global_rank) % 3], {})
                seen.append(memory.agreed(Key("g", f"s{n} {trainer.global_rank}", 1, f"p{n}"), mine).executor)

    fit(Recurrent, ours(), max_steps=1, callbacks=[Asking()])
    return {"seen": seen}


def centred(folder: Path) -> dict[str, Any]:
    """One rank measures and the other knows already; what is measured runs graphs more often than steps."""
    from lightning_ort.compiler import contest

    rank = dist.get_rank()
    settings = {"LIGHTNING_ORT_MEASURE": "1", "LIGHTNING_ORT_CACHE_DIR": str(folder / f"cache of centred {rank}")}
    with mock.patch.dict("os.environ", settings):
        found = compared(Centred, unused=True, max_steps=12)
        if rank == 1:
            contest.MEMORY.forget()
            os.environ["LIGHTNING_ORT_CACHE_DIR"] = str(folder / "another of centred")
        found["again"] = compared(Centred, unused=True, max_steps=12)
    contest.MEMORY.forget()
    return found


class Ways(Callback):
    """Whether each call of the training step was made as it is, and what is known of it."""

    def __init__(self) -> None:
        self.seen: list[bool] = []
        self.now = False

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(self.now)
        self.now = False
        if isinstance(trainer.strategy, ORTStrategy):
            self.turns = dict(trainer.strategy.report().step("training_step").turns)

    def on_fit_start(self, trainer, pl_module):
        self.seen = []

    def noting(self) -> Any:
        """A block in which calls are noted."""
        as_it_is, leaves = CompiledSteps._as_it_is, CompiledSteps.leaves

        def noted(steps: CompiledSteps, step: StepReport, *args: Any) -> Any:
            self.now = step.name == "training_step"
            return as_it_is(steps, step, *args)

        def left(steps: CompiledSteps, name: str) -> bool:
            found = leaves(steps, name)
            self.now = found and name == "training_step"
            return found

        return mock.patch.multiple(CompiledSteps, _as_it_is=noted, leaves=left)


def in_turns(folder: Path) -> dict[str, Any]:
    """Calls in graphs and as they are, of which each rank finds another way to be faster."""
    from lightning_ort.compiler import contest
    from lightning_ort.lightning import turns

    rank, found = dist.get_rank(), {}
    milliseconds = [(2.0, 1.0), (1.0, 1.5)][rank]  # as it is is faster by 0.5 for the one, slower by that for another
    pretended = mock.Mock(side_effect=lambda row: milliseconds[pretended.call_count % 2 == 0] / 1e3)
    ort_only = mock.patch.object(
        contest, "race", lambda runs, **limits: {name: float(name != "onnxruntime") for name in runs}
    )
    settings = {"LIGHTNING_ORT_MEASURE": "1", "LIGHTNING_ORT_CACHE_DIR": str(folder / f"cache {rank}")}
    fits = {
        "images": (Images, {}),  # what is logged by all waits for what is gathered, or the other way round
        "synced": (Images, {}),
        "adversaries": (Adversaries, {"unused": True, "max_steps": 208}),
        "accumulated": (Text, {"accumulate_grad_batches": 2, "max_steps": 52}),
        "again": (Images, {}),
        "known to one": (Images, {}),
    }
    with mock.patch.dict("os.environ", settings), ort_only:
        for name, (kind, flags) in fits.items():
            if name == "known to one" and rank == 1:
                contest.MEMORY.forget()
                os.environ["LIGHTNING_ORT_CACHE_DIR"] = str(folder / "another")
            ways, pretended.call_count = Ways(), 0
            # on a busy machine all calls may be long ones, which are not compared
            slow = mock.patch.object(turns, "_LONG", float("inf"))
            soon = mock.patch.object(turns, "_LASTING", 0.0)
            with mock.patch.object(turns, "usual", pretended), slow, soon, ways.noting():
                flags = {"max_steps": 104, "callbacks": [ways]} | flags
                if name in ("again", "known to one"):
                    flags["eager"] = found["images"]["eager"]
                found[name] = synced(**flags) if name == "synced" else compared(kind, **flags)
            found[name] |= {"ways": ways.seen, "turns": ways.turns, "measured": pretended.call_count}
    contest.MEMORY.forget()
    found["synced"]["in graphs"] = synced(max_steps=104)["ort"]
    return found


def of_orttrainer(**distributed: Any) -> dict[str, Any]:
    """Half of each batch for each of two processes, and whole ones for one."""
    sys.path.append(str(Path(__file__).parents[1] / "helpers"))
    import orttrainer_models as models

    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, options in (
        ("eager", {}),
        ("ort", {"world_rank": rank, "world_size": world, "local_rank": 0, **distributed}),
    ):
        sections = {"distributed": options, "device": {"id": scenarios.ACCELERATOR}}
        trainer = models.trainer(models.ADAM(lr=0.01), model=models.make().double(), **sections)
        for x, label in models.batches():
            if options:
                x, label = x.chunk(world)[rank], label.chunk(world)[rank]
            trainer.train_step(x.double(), label)
        found[name] = {n: x.cpu() for n, x in trainer.state_dict(pytorch_format=True).items()}
    return found


def scenarios_in(folder: Path) -> dict[str, Any]:
    return {
        "images": lambda: compared(Images),
        "images32": lambda: compared(Images, precision="32-true"),
        "text": lambda: compared(Text, accumulate_grad_batches=2),
        "text32": lambda: compared(Text, precision="32-true", accumulate_grad_batches=2, gradient_clip_val=0.3),
        "recurrent": lambda: compared(Recurrent),
        "adversaries": lambda: compared(Adversaries, unused=True),
        "synced": synced,
        "synced as torch": lambda: compared(Images, sync_batchnorm=True),  # whose own refuses the CPU
        "thawed": thawed,
        "own statistics": own_statistics,
        "hooks": hooks,
        "combined": combined,
        "sharded": lambda: sharded(folder),
        "overflowing": overflowing,
        "agreement": agreement,
        "centred": lambda: centred(folder),
        "noted": lambda: compared(Noted, max_steps=5),
        "in turns": lambda: in_turns(folder),
        "orttrainer, plain": of_orttrainer,
        "orttrainer, zero": lambda: of_orttrainer(deepspeed_zero_optimization={"stage": 1}),
    }


if __name__ == "__main__":
    scenarios.run(scenarios_in, "{rank}.pt")
