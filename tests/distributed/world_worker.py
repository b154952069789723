"""Fits of several processes with callbacks and metrics that depend on how many there are, for :mod:`test_world`.

    python world_worker.py FOLDER SCENARIO...

writes to ``FOLDER/RANK-WORLD.pt`` what each scenario has found.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import scenarios
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    EMAWeightAveraging,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_ort import ORTStrategy

ROWS, BATCH = 96, 16


class Classifier(LightningModule):
    """Float64, with metrics of all ranks."""

    def __init__(self, batch_size: int = BATCH) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.net = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 4))
        self.accuracy = MulticlassAccuracy(4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy.update(logits, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", loss, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


class Plain(Classifier):
    """Without what depends on the rows of a rank; its loss is the mean over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4))


class Losses(Callback):
    """What was logged as the loss of each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(trainer.callback_metrics["loss_step"]))


def data(rows: int = ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) * 0.7).long() % 4)


def fit(
    strategy: Any,
    module: LightningModule,
    *,
    rows: int = ROWS,
    shuffle: bool = True,
    path: Path | None = None,
    **flags: Any,
) -> Trainer:
    """Lightning's sampler gives each rank its rows, otherwise than that of another number of ranks; or one in order."""
    seed_everything(1, verbose=False)
    for parameter in module.parameters():  # whatever came before
        nn.init.normal_(parameter, 0.0, 0.3)
    world = int(dist.get_world_size())
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy=strategy, precision="64-true", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=shuffle, **{"max_epochs": 3, **flags},
    )  # fmt: skip
    sampler = None if shuffle else DistributedSampler(data(rows), world, dist.get_rank(), shuffle=False)
    loaders = [DataLoader(data(rows), BATCH // world, sampler=sampler) for _ in range(2)]
    trainer.fit(module, *loaders, ckpt_path=None if path is None else str(path))
    return trainer


def ours(**options: Any) -> ORTStrategy:
    return ORTStrategy(print_report=False, **options)


def outcome(trainer: Trainer) -> dict[str, Any]:
    weights = {name: tensor.clone() for name, tensor in trainer.lightning_module.state_dict().items()}
    return {**weights, **{f"metric {k}": v.clone() for k, v in trainer.callback_metrics.items()}}


def compared(callbacks: Any = list, **flags: Any) -> dict[str, Any]:
    # averages of weights are a copy that Lightning makes before it makes a module of float32 one of float64
    theirs, mine = (
        fit(strategy, Classifier().double(), callbacks=callbacks(), **flags) for strategy in ("ddp", ours())
    )
    return {"eager": outcome(theirs), "ort": outcome(mine)}


def finder() -> dict[str, Any]:
    """What each strategy says to somebody who looks for a batch size."""
    found = {}
    for name, strategy in (("eager", "ddp"), ("ort", ours())):
        try:
            fit(strategy, Classifier(), callbacks=[BatchSizeFinder()])
        except MisconfigurationException as error:
            found[name] = str(error)
    return found


class Broken(Plain):
    """The last rank leaves its graph once more than the others."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 1:
            torch._dynamo.graph_break()
            loss = loss * 1.0
        return loss


def reported() -> dict[str, Any]:
    """Reports of all ranks on rank 0, which asks for it alone, and again after a validation."""
    strategy = ours()
    trainer = fit(strategy, Broken(), max_epochs=1)
    found = {"ranks": strategy.report().ranks}
    if trainer.is_global_zero:
        found["text"] = str(strategy.report())
    trainer.validate(trainer.lightning_module, DataLoader(data(), 4), verbose=False)
    return {**found, "later": strategy.report().ranks}


def memory() -> dict[str, Any]:
    """Bytes of AdamW's states on this rank, of a model of layers of several sizes, in float32."""
    found = {}
    for name, options in (("whole", {}), ("parts", {"shard_optimizer": True})):
        module = Plain()
        module.net = nn.Sequential(nn.Linear(8, 64), *(nn.Linear(64, 64) for _ in range(8)), nn.Linear(64, 4))
        trainer = fit(ours(**options), module, max_steps=2, max_epochs=None)
        optimizer = trainer.optimizers[0]
        states = getattr(optimizer, "optim", optimizer).state
        found[name] = sum(
            v.numel() * v.element_size() for s in states.values() for v in s.values() if torch.is_tensor(v) and v.dim()
        )
        found["parameters"] = sum(p.numel() * p.element_size() for p in module.parameters())
    return found


def resumed(folder: Path, begin: int, end: int) -> dict[str, Any]:
    """Epochs ``begin`` to ``end`` of one run, from the checkpoint of whoever was before; step by step, the losses.

    Lightning reads a checkpoint before it makes a module of float32 one of float64: it is one from the start.
    """
    losses = Losses()
    path = folder / f"{begin}.ckpt" if begin else None
    trainer = fit(ours(), Plain().double(), shuffle=False, max_epochs=end, callbacks=[losses], path=path)
    trainer.save_checkpoint(folder / f"{end}.ckpt")
    return {"losses": losses.seen, "ort": outcome(trainer)}


def whole(epochs: int) -> dict[str, Any]:
    """The same run in one piece, by Lightning's own strategy."""
    losses = Losses()
    trainer = fit("auto", Plain().double(), shuffle=False, max_epochs=epochs, callbacks=[losses])
    return {"losses": losses.seen, "eager": outcome(trainer)}


def scenarios_in(folder: Path) -> dict[str, Any]:
    return {
        "ema": partial(compared, lambda: [EMAWeightAveraging(decay=0.8)]),
        "swa": partial(compared, lambda: [StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1)]),
        "uneven": partial(compared, rows=ROWS - 5),
        "finder": finder,
        "reported": reported,
        "memory": memory,
        "whole": lambda: whole(3),
        **{f"epoch {n}": partial(resumed, folder, n, n + 1) for n in range(3)},
    }


if __name__ == "__main__":
    scenarios.run(scenarios_in, "{rank}-{world}.pt")
