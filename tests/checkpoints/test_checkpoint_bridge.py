"""Runs that go from Lightning to ORTTrainer and back, or begin under one and end under the other."""

from __future__ import annotations

import copy
import random
from functools import partial

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, WeightAveraging
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from modules import table
from orttrainer_models import DATA, batches, cross_entropy
from orttrainer_models import make as make_recorded
from parity import assert_same_state, fit, make_trainer, quiet, state_of
from torch import nn
from torch.utils.data import DataLoader

from lightning_ort import (
    CheckpointError,
    ORTCheckpointIO,
    ORTPrecision,
    ORTStrategy,
    ORTTrainer,
    ORTTrainerOptions,
    optim,
)
from lightning_ort.amp import DynamicLossScaler
from lightning_ort.checkpoints import orttrainer
from lightning_ort.checkpoints.progress import Position, loops_at


def network() -> nn.Sequential:
    # BatchNorm takes a bias away again, so that its gradient is rounding
    return nn.Sequential(nn.Linear(12, 24, bias=False), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 4))


class Torch(ORTStrategy):
    """The strategy's way with checkpoints, without anything compiled."""

    def _call(self, name, context, *args, **kwargs):
        with context():
            return getattr(self.lightning_module, name)(*args, **kwargs)

    def optimizer_step(self, *args, **kwargs):
        return SingleDeviceStrategy.optimizer_step(self, *args, **kwargs)


class Wrapped(LightningModule):
    """Trains the network in an attribute, with a schedule of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        # the kernel that ORTTrainer updates by, and learning rates that have no rounding
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1, fused=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Halving(optim.lr_scheduler._LRScheduler):
    """The same schedule for an ORTTrainer."""

    def get_lr(self, info):
        return [0.02 * 0.5 ** (info.optimization_step // 5)]


def light_fit(*args, **flags):
    """As :func:`parity.fit`, for what does not depend on who computes the steps."""
    return fit(*args, strategy=Torch(), **flags)


CONFIG = partial(optim.AdamConfig, lr=0.02, lambda_coef=0.1)


def make_ort_trainer(model=None, config=None, **sections) -> ORTTrainer:
    description = {
        "inputs": [("x", ["b", 12]), ("label", ["b"])],
        "outputs": [("loss", [], True), ("logits", ["b", 4])],
    }
    sections = {"device": {"id": "cpu"}, "utils": {"grad_norm_clip": False}, "lr_scheduler": Halving(), **sections}
    options = ORTTrainerOptions(sections)
    return ORTTrainer(model or network(), description, config or CONFIG(), loss_fn=cross_entropy, options=options)


def step(trainer, epochs=1):
    for _ in range(epochs):
        for x, y in table():
            trainer.train_step(x, y)


def assert_bits(a, b):
    assert list(a) == list(b)
    for name, value in a.items():
        assert torch.equal(value, b[name]), f"{name} differs by {(value.double() - b[name].double()).abs().max()}"


def optimizer_of(run):
    return run.trainer.optimizers[0].state_dict()


def assert_same_optimizer(a, b):
    a, b = optimizer_of(a), optimizer_of(b)
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for i, state in a["state"].items():
        assert_bits(state, b["state"][i])


@pytest.fixture(scope="module")
def whole():
    """Four epochs of six batches in Lightning, without interruption."""
    return fit(Wrapped, table, max_epochs=4)


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """Two of them, with checkpoints after each second step and at the end."""
    folder = tmp_path_factory.mktemp("half")
    callback = partial(ModelCheckpoint, folder, every_n_train_steps=2, filename="{step}", save_top_k=-1)
    run = fit(Wrapped, table, max_epochs=2, callbacks=callback, enable_checkpointing=True)
    run.trainer.save_checkpoint(folder / "end.ckpt")
    return folder


def through(path, target, epochs=0):
    trainer = make_ort_trainer()
    trainer.load_checkpoint(path)
    step(trainer, epochs)
    trainer.save_checkpoint(target)
    return trainer


def test_cycle_without_steps(whole, half, tmp_path):
    through(half / "end.ckpt", tmp_path / "x.h5")
    rest = fit(Wrapped, table, max_epochs=4, ckpt_path=tmp_path / "x.h5", seed=99)
    assert rest.trainer.global_step == 24 and rest.trainer.current_epoch == 4
    assert_bits(state_of(rest.module), state_of(whole.module))
    assert_same_optimizer(rest, whole)
    assert rest.trainer.lr_scheduler_configs[0].scheduler.last_epoch == 24


def test_cycle_with_steps(whole, half, tmp_path):
    """The third epoch in ORTTrainer: still bit for bit."""
    trainer = through(half / "end.ckpt", tmp_path / "x.h5", epochs=1)
    assert (trainer._train_step_info.step, trainer._train_step_info.optimization_step) == (18, 18)
    rest = fit(Wrapped, table, max_epochs=4, ckpt_path=tmp_path / "x.h5", seed=99)
    assert rest.trainer.global_step == 24 and rest.trainer.current_epoch == 4
    assert_bits(state_of(rest.module), state_of(whole.module))
    assert_same_optimizer(rest, whole)


def test_run_that_began_in_ort_trainer(whole, tmp_path):
    model = Wrapped()
    model.load_state_dict(whole.initial)
    trainer = make_ort_trainer(model.net)
    step(trainer, 2)
    trainer.save_checkpoint(tmp_path / "x.h5")
    rest = fit(Wrapped, table, max_epochs=4, ckpt_path=tmp_path / "x.h5", seed=99)
    assert rest.trainer.global_step == 24 and rest.trainer.current_epoch == 4
    assert_bits(state_of(rest.module), state_of(whole.module))
    assert_same_optimizer(rest, whole)


class Recorded(LightningModule):
    """The network and the optimizer of a recorded training."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.losses = make_recorded(), []

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.model(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.0)


def test_file_of_the_original_goes_on_in_lightning():
    """The losses are those that ONNX Runtime's ORTTrainer had after the same file; nothing is unpickled for it."""
    with np.load(DATA / "adam_mlp_10_steps_then.npz") as then:
        expected = then["losses"]
    following = DataLoader(batches()[10:], batch_size=None)
    assert len(following) == len(expected) == 10
    run = fit(Recorded, lambda: following, max_epochs=2, ckpt_path=DATA / "adam_mlp_10_steps.h5")
    assert run.trainer.global_step == 20 and run.trainer.current_epoch == 2
    np.testing.assert_allclose(run.module.losses, expected, rtol=0, atol=2e-6)


def test_cycle_within_an_epoch(half, tmp_path):
    """Lightning begins the loader anew there; the detour through ORTTrainer changes nothing about that."""
    through(half / "step=8.ckpt", tmp_path / "x.h5")
    runs = [light_fit(Wrapped, table, max_epochs=4, ckpt_path=p) for p in (half / "step=8.ckpt", tmp_path / "x.h5")]
    assert runs[0].trainer.global_step == runs[1].trainer.global_step == 24
    assert_bits(state_of(runs[1].module), state_of(runs[0].module))
    assert_same_optimizer(runs[1], runs[0])


def test_what_the_strategy_adds_is_plain(half):
    found = torch.load(half / "step=8.ckpt", weights_only=True)["lightning_ort"]
    names = ["net.0.weight", "net.1.weight", "net.1.bias", "net.3.weight", "net.3.bias"]
    assert found == {
        "version": 1,
        "shared": {},
        "optimizers": [{"class": "torch.optim.adamw.AdamW", "kind": "AdamOptimizer", "problem": "", "names": names}],
        "train_step_info": {"step": 8, "optimization_step": 8},
        "batches_per_epoch": 6,
        "loss_scaler": None,
    }


@pytest.mark.parametrize("accumulate", [1, 4])
def test_loops_are_those_of_lightning(tmp_path, accumulate):
    """Each of Lightning's own checkpoints, from the counters alone."""
    callback = partial(ModelCheckpoint, tmp_path, every_n_train_steps=1, filename="{step}", save_top_k=-1)
    flags = {"max_epochs": 3, "accumulate_grad_batches": accumulate, "enable_checkpointing": True}
    run = fit(Wrapped, table, strategy="auto", callbacks=callback, **flags)
    run.trainer.save_checkpoint(tmp_path / "end.ckpt")
    fresh = make_trainer("auto", max_epochs=1).fit_loop.state_dict()
    compared = 0
    for path in tmp_path.iterdir():
        expected = torch.load(path)["loops"]["fit_loop"]
        progress = expected["epoch_loop.batch_progress"]
        if progress["is_last_batch"] and path.stem != "end":
            continue  # between the last batch and the end of the epoch, where no ORTTrainer stops
        position = Position(progress["total"]["processed"], torch.load(path)["global_step"], 6)
        found = loops_at(fresh, position, accumulate=accumulate, manual=False)
        # for display alone
        del found["epoch_loop.scheduler_progress"], expected["epoch_loop.scheduler_progress"]
        assert found == expected, path
        compared += 1
    assert compared == (16 if accumulate == 1 else 4)


SCHEDULES = {
    "epochs": (lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5), {"interval": "epoch"}),
    "every_4_batches": (lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5), {"interval": "step", "frequency": 4}),
    "one_cycle": (lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=30), {"interval": "step"}),
    "warm_up": (
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1, 5), torch.optim.lr_scheduler.StepLR(o, 3)],
            milestones=[5],
        ),
        {"interval": "step"},
    ),
}


class Scheduled(Wrapped):
    def __init__(self, schedule="epochs") -> None:
        super().__init__()
        self.schedule = schedule

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()["optimizer"]
        make, settings = SCHEDULES[self.schedule]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **settings}}


@pytest.fixture(scope="module")
def from_trainer(tmp_path_factory):
    """A file of an ORTTrainer that never saw Lightning, after 12 batches, and its network."""
    path = tmp_path_factory.mktemp("trainer") / "x.h5"
    trainer = make_ort_trainer()
    step(trainer, 2)
    trainer.save_checkpoint(path, {"note": "mine"})
    return path


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_schedules_go_on(from_trainer, schedule):
    expected = fit(partial(Scheduled, schedule), table, strategy="auto", max_epochs=2)
    found = light_fit(partial(Scheduled, schedule), table, max_epochs=2, ckpt_path=from_trainer)
    assert found.trainer.global_step == 12 and found.trainer.current_epoch == 2
    one, other = (run.trainer.lr_scheduler_configs[0].scheduler for run in (expected, found))
    assert other.get_last_lr() == one.get_last_lr()
    assert optimizer_of(found)["param_groups"] == optimizer_of(expected)["param_groups"]
    assert other.last_epoch == one.last_epoch > 0


def test_evaluation_of_a_trainer_file(from_trainer):
    module, trainer = Wrapped(), make_trainer(Torch(), max_epochs=1)
    with h5py.File(from_trainer) as file:
        weights = {n: torch.as_tensor(v[()]) for n, v in file["model/full_precision"].items()}
    net = network()
    net.load_state_dict(weights)
    x = next(iter(table(16)))[0]
    with quiet(), torch.no_grad():
        predicted = trainer.predict(module, table(16), ckpt_path=from_trainer)[0]
        validated = trainer.validate(module, table(16), ckpt_path=from_trainer, verbose=False)
        torch.testing.assert_close(predicted, net.eval()(x), rtol=0, atol=1e-5)
    loss = cross_entropy(net(x), next(iter(table(16)))[1]).item()
    assert validated[0]["val_loss"] == pytest.approx(loss, rel=1e-5)


def test_through_an_asynchronous_wrapper(from_trainer):
    plugins = [AsyncCheckpointIO()]
    run = light_fit(Wrapped, table, max_epochs=2, ckpt_path=from_trainer, plugins=plugins)
    with h5py.File(from_trainer) as file:
        assert torch.equal(run.module.net[0].weight, torch.as_tensor(file["model/full_precision/0.weight"][()]))


# -- other networks and optimizers --------------------------------------------------------------------------------


class Tied(Wrapped):
    """Three names for two tensors, a frozen layer, and weights that the network does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 12, bias=False), nn.Tanh(), nn.Linear(12, 12, bias=False), nn.Tanh())
        self.net.append(nn.Linear(12, 4))
        self.net[2].weight = self.net[0].weight
        self.net[4].bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]) * self.scale, batch[1])


def test_shared_frozen_and_further_weights(tmp_path):
    whole = light_fit(Tied, table, max_epochs=2)
    half = light_fit(Tied, table, max_epochs=1)
    half.trainer.save_checkpoint(tmp_path / "x.ckpt")
    model = Tied().net
    trainer = make_ort_trainer(model)
    trainer.load_checkpoint(tmp_path / "x.ckpt")
    assert_bits(state_of(model), state_of(half.module.net))
    assert list(trainer.state_dict()["optimizer"]) == ["0.weight", "4.weight"]
    trainer.save_checkpoint(tmp_path / "x.h5")
    rest = light_fit(Tied, table, max_epochs=2, ckpt_path=tmp_path / "x.h5", seed=5)
    assert_bits(state_of(rest.module), state_of(whole.module))
    assert_same_optimizer(rest, whole)


class Two(LightningModule):
    """Two networks, each with an optimizer of its own, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.other = network(), network()

    def training_step(self, batch, batch_idx):
        for net, optimizer in zip((self.one, self.other), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(net(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self):
        return [
            optim.Lamb(self.one.parameters(), lr=0.01, max_norm=1e9),
            torch.optim.SGD(self.other.parameters(), lr=0.1, momentum=0.9),
        ]


def test_one_of_two_networks(tmp_path):
    whole = light_fit(Two, table, max_epochs=2)
    light_fit(Two, table, max_epochs=1).trainer.save_checkpoint(tmp_path / "x.ckpt")
    lamb = optim.LambConfig(lr=0.01, max_norm_clip=1e9)
    trainer = make_ort_trainer(config=lamb, lr_scheduler=None)
    with pytest.raises(CheckpointError, match=r"the names fit after each of 'one\.', 'other\.'\. Say which"):
        trainer.load_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=r"SGD with momentum=0\.9 has no counterpart"):
        trainer.load_checkpoint(tmp_path / "x.ckpt", prefix="other.")
    with pytest.raises(CheckpointError, match=r"with prefix='none\.' these have no counterpart: 0\.weight"):
        trainer.load_checkpoint(tmp_path / "x.ckpt", prefix="none.")
    trainer.load_checkpoint(tmp_path / "x.ckpt", prefix="one.")
    assert int(trainer.state_dict()["optimizer"]["shared_optimizer_state"]["Step"][0]) == 7
    trainer.save_checkpoint(tmp_path / "x.h5")
    rest = light_fit(Two, table, max_epochs=2, ckpt_path=tmp_path / "x.h5", seed=5)
    assert_bits(state_of(rest.module), state_of(whole.module))
    assert rest.trainer.global_step == whole.trainer.global_step == 24
    for one, other in zip(rest.trainer.optimizers, whole.trainer.optimizers, strict=True):
        assert_bits(one.state_dict()["state"][0], other.state_dict()["state"][0])


class Plain(Wrapped):
    """A class of optimizer with settings."""

    def __init__(self, kind=torch.optim.SGD, **settings) -> None:
        super().__init__()
        self.make = partial(kind, **settings)

    def configure_optimizers(self):
        return self.make(self.parameters(), lr=0.05)


def test_sgd(tmp_path):
    whole = light_fit(Plain, table, max_epochs=3)
    light_fit(Plain, table, max_epochs=1).trainer.save_checkpoint(tmp_path / "x.ckpt")
    trainer = make_ort_trainer(config=optim.SGDConfig(lr=0.05), lr_scheduler=None)
    assert trainer.load_checkpoint(tmp_path / "x.ckpt") == {"epoch": 1, "global_step": 6}
    step(trainer)
    trainer.save_checkpoint(tmp_path / "x.h5")
    rest = light_fit(Plain, table, max_epochs=3, ckpt_path=tmp_path / "x.h5", seed=5)
    assert rest.trainer.global_step == 18
    assert_same_state(state_of(whole.module), state_of(rest.module), 1e-5)


def test_weights_before_averaging(tmp_path):
    """ORTTrainer goes on from the weights that were trained, and not from their average."""
    saving = partial(ModelCheckpoint, tmp_path, every_n_train_steps=8, filename="x")
    callbacks = lambda: [WeightAveraging(), saving()]  # noqa: E731
    light_fit(Wrapped, table, max_epochs=2, callbacks=callbacks, enable_checkpointing=True)
    found = torch.load(tmp_path / "x.ckpt", weights_only=False)
    assert not torch.equal(found["current_model_state"]["net.3.bias"], found["state_dict"]["net.3.bias"])
    trainer = make_ort_trainer()
    trainer.load_checkpoint(tmp_path / "x.ckpt", allow_pickle=True)
    assert torch.equal(trainer.state_dict(True)["3.bias"], found["current_model_state"]["net.3.bias"])


def test_weights_alone(tmp_path):
    """What ModelCheckpoint(save_weights_only=True) writes."""
    run = light_fit(Wrapped, table, max_epochs=1)
    run.trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    trainer = make_ort_trainer()
    with pytest.warns(UserWarning, match="Missing key: optimizer in state_dict"):
        trainer.load_checkpoint(tmp_path / "x.ckpt")
    assert_bits(trainer.state_dict(True), run.module.net.state_dict())
    assert trainer._train_step_info.step == 6


# -- loss scale -----------------------------------------------------------------------------------------------------


def mixed(**settings):
    return {"mixed_precision": {"enabled": True, "loss_scaler": DynamicLossScaler(**settings)}}


def test_scale_of_a_trainer_survives_its_files(tmp_path):
    trainer = make_ort_trainer(**mixed(loss_scale=2.0**22, up_scale_window=4, max_loss_scale=2.0**30))
    step(trainer)
    scaler = trainer.options.mixed_precision.loss_scaler
    state = scaler.state_dict()
    assert 0 < trainer._train_step_info.optimization_step < 6, "nothing overflowed, or everything"
    trainer.save_checkpoint(tmp_path / "x.h5")
    fresh = make_ort_trainer(**mixed(loss_scale=4.0, up_scale_window=4, max_loss_scale=2.0**30))
    fresh.load_checkpoint(tmp_path / "x.h5")
    other = fresh.options.mixed_precision.loss_scaler
    assert other.state_dict() == state
    step(trainer)
    step(fresh)
    assert other.state_dict() == scaler.state_dict()
    for name, value in trainer.state_dict(True).items():
        assert torch.equal(value, fresh.state_dict(True)[name])
    # a trainer without a scale, and a file without one
    make_ort_trainer().load_checkpoint(tmp_path / "x.h5")
    plain = make_ort_trainer()
    plain.save_checkpoint(tmp_path / "plain.h5")
    fresh.load_checkpoint(tmp_path / "plain.h5")
    assert other.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("kind", ["GradScaler", "DynamicLossScaler"])
def test_scale_goes_through_the_cycle(tmp_path, kind):
    """Overflows are skipped under Lightning; ORTTrainer and the next Lightning run go on with the same scale."""

    def plugin():
        if kind == "GradScaler":
            return ORTPrecision("16-mixed", torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=50))
        return ORTPrecision("16-mixed", DynamicLossScaler(loss_scale=2.0**22, up_scale_window=50))

    def flags():
        return {"plugins": [plugin()]}

    whole = light_fit(Wrapped, table, max_epochs=2, **flags())
    first = light_fit(Wrapped, table, max_epochs=1, **flags())
    skipped = first.trainer.precision_plugin.skipped_steps
    assert 0 < skipped < 6
    first.trainer.save_checkpoint(tmp_path / "x.ckpt")
    trainer = make_ort_trainer(**mixed(up_scale_window=50))
    trainer.load_checkpoint(tmp_path / "x.ckpt")
    scaler = trainer.options.mixed_precision.loss_scaler
    summary = first.trainer.precision_plugin.scaler_summary()
    assert scaler.state_dict() == {"loss_scale": 2.0 ** (22 - skipped), "stable_steps": summary["stable_steps"]}
    assert (trainer._train_step_info.step, trainer._train_step_info.optimization_step) == (6, 6 - skipped)
    trainer.save_checkpoint(tmp_path / "x.h5")
    rest = light_fit(Wrapped, table, max_epochs=2, ckpt_path=tmp_path / "x.h5", seed=5, **flags())
    assert_bits(state_of(rest.module), state_of(whole.module))
    found, expected = rest.trainer.precision_plugin, whole.trainer.precision_plugin
    assert found.scaling.scale == expected.scaling.scale
    assert found.skipped_steps == expected.skipped_steps >= skipped
    assert found.scaler_summary() == expected.scaler_summary() and found.scaler_summary()["stable_steps"] > 0


# -- what does not fit ------------------------------------------------------------------------------------------------


class Narrow(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.net[3] = nn.Linear(24, 5)


class Renamed(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), *network())


class Groups(Wrapped):
    def configure_optimizers(self):
        one, *others = self.parameters()
        return torch.optim.AdamW([{"params": [one]}, {"params": others, "weight_decay": 0.0}])


MISMATCHED = {
    "shapes": ("h5", Narrow, r"another network than Narrow: net\.3\.bias is \[4\], expected \[5\]"),
    "names": (
        "h5",
        Renamed,
        r"8 of 8 weights of the ORTTrainer have no counterpart.*The LightningModule has net\.1\.weight",
    ),
    "optimizer": ("h5", Plain, r"is of AdamOptimizer, but configure_optimizers returned SGD"),
    "amsgrad": ("h5", partial(Plain, torch.optim.Adam, amsgrad=True), r"returned Adam \(Adam with amsgrad=True"),
    "weights_only": ("weights", Wrapped, "was written without optimizer states"),
    "part": ("part", Wrapped, r"holds the optimizer's states of rank 1 of 2 only \(stage 1 of ZeRO\)"),
    "lightning_shapes": ("ckpt", Narrow, r"size mismatch for net\.3\.weight"),
    "lightning_names": ("ckpt", Renamed, r"Missing key\(s\) in state_dict"),
    "lightning_optimizer": ("ckpt", Plain, r"not that of SGD: it has no momentum, dampening, nesterov, but lr, betas"),
    "lightning_groups": ("ckpt", Groups, r"its groups have \[5\] parameters, expected \[1, 4\]"),
}


class Counting(Callback):
    """A callback whose state is in each checkpoint."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *args):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state_dict):
        self.batches = state_dict["batches"]


FILES = {"ckpt": "x.ckpt", "weights": "weights.h5", "part": "part.h5"}


@pytest.fixture(scope="module")
def files(from_trainer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    run = light_fit(Wrapped, table, max_epochs=1, callbacks=Counting)
    assert run.trainer.callbacks[0].batches == 6
    run.trainer.save_checkpoint(folder / "x.ckpt")
    trainer = make_ort_trainer()
    trainer.save_checkpoint(folder / "weights.h5", include_optimizer_states=False)
    part = trainer.state_dict()
    part["trainer_options"] |= {"zero_stage": 1, "world_rank": 1, "world_size": 2}
    orttrainer.write(folder / "part.h5", part, {})
    return {"h5": from_trainer, **{n: folder / f for n, f in FILES.items()}}


@pytest.mark.parametrize("case", sorted(MISMATCHED))
def test_files_that_do_not_fit_change_nothing(files, case):
    kind, make, message = MISMATCHED[case]
    module = make()
    before = state_of(module)
    trainer = make_trainer(Torch(), max_epochs=3, callbacks=[Counting()])
    loops = copy.deepcopy(trainer.fit_loop.state_dict())
    with quiet(), pytest.raises((CheckpointError, RuntimeError), match=message):
        trainer.fit(module, table(), ckpt_path=files[kind])
    assert_bits(state_of(module), before)
    assert trainer.fit_loop.state_dict() == loops and trainer.global_step == 0
    assert trainer.callbacks[-1].batches == 0


def test_fit_goes_on_after_a_file_that_did_not_fit(files):
    """The same trainer and module, from the start: as if nothing had happened."""
    torch.manual_seed(1)
    module = Wrapped()
    trainer = make_trainer(Torch(), max_epochs=2)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.05)
    with quiet(), pytest.raises(CheckpointError, match="not that of SGD"):
        trainer.fit(module, table(), ckpt_path=files["ckpt"])
    with quiet():
        trainer.fit(module, table())
    torch.manual_seed(1)
    other = Wrapped()
    other.configure_optimizers = lambda: torch.optim.SGD(other.parameters(), lr=0.05)
    expected = make_trainer(Torch(), max_epochs=2)
    with quiet():
        expected.fit(other, table())
    assert trainer.fit_loop.state_dict() == expected.fit_loop.state_dict()
    assert_bits(state_of(module), state_of(other))


def test_other_strategies_refuse_files_of_a_trainer(from_trainer):
    module = Wrapped()
    before = state_of(module)
    trainer = make_trainer("auto", max_epochs=3, plugins=[ORTCheckpointIO()])
    with (
        quiet(),
        pytest.raises(CheckpointError, match=r"x\.h5 is a checkpoint of ORTTrainer.*Trainer\(strategy='ort'\)"),
    ):
        trainer.fit(module, table(), ckpt_path=from_trainer)
    assert_bits(state_of(module), before)


def refused(trainer, path, message, kind=CheckpointError, **settings):
    before = trainer.state_dict()
    with pytest.raises(kind, match=message):
        trainer.load_checkpoint(path, **settings)
    after = trainer.state_dict()
    np.testing.assert_equal(after, before)


def test_lightning_files_that_do_not_fit_an_ort_trainer(tmp_path, half):
    trainer = make_ort_trainer()
    fit(Wrapped, table, strategy="auto", max_epochs=1).trainer.save_checkpoint(tmp_path / "auto.ckpt")
    refused(trainer, tmp_path / "auto.ckpt", r"auto\.ckpt was not written under strategy='ort'")
    light_fit(partial(Plain, torch.optim.RMSprop), table, max_steps=1).trainer.save_checkpoint(tmp_path / "rms.ckpt")
    refused(
        trainer, tmp_path / "rms.ckpt", r"its optimizer cannot be that of an ORTTrainer: RMSprop has no counterpart"
    )
    sgd = make_ort_trainer(config=optim.SGDConfig(lr=0.1))
    refused(sgd, half / "end.ckpt", "Unexpected keys|Optimizer mismatch", (RuntimeError, AssertionError))
    refused(make_ort_trainer(Narrow().net), half / "end.ckpt", r"3\.weight\] has shape \[4, 24\]", RuntimeError)
    refused(make_ort_trainer(Renamed().net), half / "end.ckpt", r"\d of 8 weights of the ORTTrainer")
    content = (half / "end.ckpt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(content[:-100])
    refused(trainer, tmp_path / "cut.ckpt", r"cut\.ckpt is cut short or damaged")
    found = torch.load(half / "end.ckpt")
    torch.save(found["state_dict"], tmp_path / "weights.pt")
    refused(trainer, tmp_path / "weights.pt", "no checkpoint of Lightning")
    torch.save({**found, "hyper_parameters": {"rule": Wrapped}}, tmp_path / "object.ckpt")
    refused(trainer, tmp_path / "object.ckpt", "allow_pickle=True", ValueError)
    trainer.load_checkpoint(tmp_path / "object.ckpt", allow_pickle=True)
    assert torch.equal(trainer.state_dict(True)["3.bias"], found["state_dict"]["net.3.bias"])


def test_damaged_trainer_files_are_noticed(files, tmp_path):
    """One flipped bit anywhere is an error, before HDF5 follows an address to nowhere."""
    content, path, chance = files["h5"].read_bytes(), tmp_path / "x.h5", random.Random(0)
    for _ in range(60):
        changed = bytearray(content)
        changed[chance.randrange(len(content) - 100)] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"x\.h5.*(its checksum is wrong|is no checkpoint)"):
            ORTCheckpointIO().load_checkpoint(path)
    with pytest.raises(OSError, match="its checksum is wrong"):
        make_ort_trainer().load_checkpoint(path)


class Twins(Wrapped):
    """Two layers of one shape, whose order in the optimizer, and their groups, are given."""

    def __init__(self, groups):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.Tanh(), torch.nn.Linear(12, 12))
        self.groups = groups

    def configure_optimizers(self):
        named = dict(self.named_parameters())
        groups = [{"params": [named[f"net.{name}"] for name in group]} for group in self.groups]
        return torch.optim.AdamW(groups, lr=0.02)


WEIGHTS, BIASES = ["0.weight", "2.weight"], ["0.bias", "2.bias"]


def test_moments_go_to_the_parameters_of_their_names(tmp_path):
    """Whatever order an optimizer has them in; those of another group are refused."""

    def run(groups, epochs, path=None):
        return light_fit(partial(Twins, groups), table, max_epochs=epochs, ckpt_path=path)

    path = tmp_path / "half.ckpt"
    whole = run([WEIGHTS, BIASES], 2)
    run([WEIGHTS, BIASES], 1).trainer.save_checkpoint(path)
    rest = run([WEIGHTS[::-1], BIASES[::-1]], 2, path)
    assert_bits(state_of(rest.module), state_of(whole.module))
    with pytest.raises(CheckpointError, match=r"its group 0 has net\.0\.weight, net\.2\.weight, and not net\.0\.bias"):
        run([[WEIGHTS[0], BIASES[0]], [WEIGHTS[1], BIASES[1]]], 2, path)
