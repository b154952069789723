"""16 bits through the Trainer: losses follow torch's own autocast, and the loss scale Lightning's own scaler."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from modules import Regressor, curve
from networks import GPT, MLP, ConvNet, examples
from parity import ACCELERATOR, MemoryLogger, Run, assert_in_ort, fit, make_trainer, needs_ort, quiet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTPrecision, amp
from lightning_ort.amp.rules import ScaledStep

pytestmark = needs_ort

DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


def scaler(init_scale: float = 2.0**16, **settings: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(ACCELERATOR, init_scale=init_scale, **settings)


def eager_plugin(precision: str = "16-mixed", **settings: Any) -> MixedPrecision:
    """Lightning's own, made by hand: by its name it would not give float16 on the CPU."""
    return MixedPrecision(precision, ACCELERATOR, scaler(**settings) if precision == "16-mixed" else None)


def ort_plugin(precision: str = "16-mixed", log: bool = False, **settings: Any) -> ORTPrecision:
    return ORTPrecision(precision, scaler(**settings) if precision == "16-mixed" else None, log=log)


def both(make: Callable, train: Callable, precision: str = "16-mixed", settings: Any = None, **flags: Any):
    """The same fit in torch and in ONNX Runtime."""
    settings = settings or {}
    eager = fit(make, train, strategy="auto", plugins=lambda: [eager_plugin(precision, **settings)], **flags)
    other = fit(make, train, strategy="ort", plugins=lambda: [ort_plugin(precision, **settings)], **flags)
    return eager, other


def logged(run: Run, name: str) -> list[float]:
    return [row[name] for _, row in run.trainer.logger.rows if name in row]


def assert_follows(eager: Run, other: Run, names: tuple[str, ...] = ("loss",), relative: float = 0.02) -> None:
    for name in names:
        wanted, got = logged(eager, name), logged(other, name)
        assert len(wanted) == len(got) > 1
        assert got == pytest.approx(wanted, rel=relative, nan_ok=True), name
    assert_in_ort(other.trainer, "training_step")


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("network", [MLP, ConvNet, GPT])
def test_follows_torch(network, precision):
    """Fifty losses within 2% of torch's under the same autocast."""
    eager, other = both(network, partial(examples, network), precision, logger=MemoryLogger, max_steps=50)
    assert len(logged(eager, "loss")) == 50
    assert logged(eager, "loss")[-1] < 0.97 * logged(eager, "loss")[0], "nothing was learnt"
    assert_follows(eager, other)
    if ACCELERATOR == "cpu":
        assert other.trainer.strategy.report()["training_step"].widened > 0
        assert "16 bits" in str(other.trainer.strategy.report())
    if precision == "16-mixed":
        assert other.trainer.precision_plugin.scaling.scale == eager.trainer.scaler.get_scale()


def weighted(heavy: tuple[int, ...] = (), weight: float = 1e36, batches: int = 20) -> DataLoader:
    """Rows with a weight, which is so large in the batches ``heavy`` that their gradients are infinite once scaled."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8 * batches, 12, generator=generator)
    weights = torch.ones(batches, 8)
    weights[list(heavy)] = weight
    return DataLoader(TensorDataset(x, x[:, :1].sin(), weights.flatten()), batch_size=8)


class Weighted(LightningModule):
    """Weighted regression by Adam under a falling learning rate; records what happens to its weights."""

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))
        self.norms: list[float] = []
        self.before: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        x, y, w = batch
        loss = ((self.net(x) - y).float().square().squeeze(1) * w).mean()
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(float(torch.stack([p.grad.norm() for p in self.parameters()]).norm()))
        self.before.append(self.net[0].weight.detach().clone())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


SMALL = {"init_scale": 1024.0, "growth_interval": 6}


def test_an_overflow_is_skipped():
    """Scale, optimizer steps, learning rate, unscaled gradients and losses are those of Lightning's own plug-in."""
    train = partial(weighted, heavy=(4, 13))
    eager, other = both(Weighted, train, settings=SMALL, logger=MemoryLogger, max_steps=20)
    plugin = other.trainer.precision_plugin
    assert plugin.skipped_steps == 2
    before = other.module.before
    assert torch.equal(before[4], before[5]), "the step was made"
    assert torch.equal(before[13], before[14]), "the step was made"
    assert not torch.equal(before[5], before[6]), "training does not go on"
    # 4 finite, halved, 6 finite, doubled, 2 finite, halved, 6 finite, doubled
    assert plugin.scaling.scale == eager.trainer.scaler.get_scale() == 1024.0
    assert plugin._rule.scaler.get_scale() == 1024.0, "the scaler that was given is not kept up to date"
    (ours,), (theirs,) = other.trainer.optimizers, eager.trainer.optimizers
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    assert (
        [float(s["step"]) for s in ours.state.values()] == [float(s["step"]) for s in theirs.state.values()] == [18] * 4
    )
    assert other.trainer.global_step == eager.trainer.global_step == 20
    assert_follows(eager, other)
    finite = [i for i in range(20) if i not in (4, 13)]
    for run in (eager, other):
        assert not any(torch.tensor(run.module.norms)[[4, 13]].isfinite())
    assert [other.module.norms[i] for i in finite] == pytest.approx([eager.module.norms[i] for i in finite], rel=0.03)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_accumulation_and_clipping(algorithm):
    """Clipping sees unscaled gradients; one infinite part spoils the whole accumulated gradient, and is not clipped."""
    flags = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm, "accumulate_grad_batches": 2}
    train = partial(weighted, heavy=(4,))
    eager, other = both(Weighted, train, settings=SMALL, logger=MemoryLogger, max_steps=10, **flags)
    assert other.trainer.precision_plugin.skipped_steps == 1
    assert other.trainer.precision_plugin.scaling.scale == eager.trainer.scaler.get_scale()
    assert_follows(eager, other)
    wanted, got = ([n for i, n in enumerate(r.module.norms) if i != 2] for r in (eager, other))
    assert got == pytest.approx(wanted, rel=0.03)


class FewerBatches(Callback):
    """Averages over one batch from the third epoch on, as ``GradientAccumulationScheduler`` would."""

    def on_train_epoch_start(self, trainer, module):
        trainer.accumulate_grad_batches = 1 if trainer.current_epoch > 1 else 4


@pytest.mark.parametrize("later", [False, True], ids=["always", "until the third epoch"])
def test_averaged_gradients_overflow_as_in_eager(later):
    """Gradients of an average of batches are as small in 16 bits as eager's, which divides losses before them."""
    train = partial(weighted, heavy=tuple(range(12)), weight=2.0, batches=12)
    flags = {"accumulate_grad_batches": 4, "max_epochs": 4, "logger": MemoryLogger}
    eager, other = both(Weighted, train, callbacks=lambda: [FewerBatches()] if later else [], **flags)
    assert_follows(eager, other)
    # one batch by itself is too much at that scale
    assert (other.trainer.precision_plugin.skipped_steps > 0) == later
    assert other.trainer.precision_plugin.scaling.scale == eager.trainer.scaler.get_scale()
    assert [float(s["step"]) for s in other.trainer.optimizers[0].state.values()] == [
        float(s["step"]) for s in eager.trainer.optimizers[0].state.values()
    ]


class Tiny(Regressor):
    """Its gradients are too small for float16 by themselves."""

    def forward(self, x):
        return self.head(self.body(x).tanh())

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = 1e-7 * F.mse_loss(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e6)


class BrokenTiny(Tiny):
    """The same with a graph break in the middle: gradients pass through torch, between two graphs."""

    def forward(self, x):
        h = self.body(x).tanh()
        torch._dynamo.graph_break()
        return self.head(h)


class OutsideTiny(Tiny):
    """The same with a loss that is made outside of all graphs, from outputs of two kinds."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        losses = F.mse_loss(self(x), y, reduction="none")
        torch._dynamo.graph_break()
        loss = total(losses)
        self.log("loss", loss)
        return loss


@torch.compiler.disable
def total(losses: torch.Tensor) -> torch.Tensor:
    return 1e-7 * losses.mean()


@pytest.mark.parametrize("make", [Tiny, BrokenTiny, OutsideTiny])
def test_small_gradients_survive(make):
    """Wherever the loss is made and whatever lies between graphs, gradients are scaled and come unscaled."""
    eager, other = both(make, curve, logger=MemoryLogger, max_steps=12)
    losses = logged(eager, "loss")
    assert sum(losses[6:]) < 0.9 * sum(losses[:6]), "nothing was learnt"
    assert_follows(eager, other)
    assert other.trainer.precision_plugin.skipped_steps == 0


def test_small_gradients_vanish_without_scaling():
    run = fit(Tiny, curve, strategy="ort", plugins=lambda: [ort_plugin(enabled=False)], max_steps=3)
    assert run.trainer.precision_plugin.scaling is None
    moved = [not torch.equal(p, run.initial[n]) for n, p in run.module.named_parameters() if n.startswith("body")]
    assert not any(moved)


class Manual(LightningModule):
    """Two optimizers and an accumulation of its own; looks at a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[torch.Tensor] = []
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        x, y, w = batch
        one, two = self.optimizers()
        out = self.second(self.first(x).tanh())
        loss = ((out - y).float().square().squeeze(1) * w).mean()
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.norms.append(self.first.weight.grad.norm())
            one.step()
            two.step()
            one.zero_grad()
            two.zero_grad()
        self.log("loss", loss)

    def configure_optimizers(self):
        return [torch.optim.SGD(self.first.parameters(), lr=0.1), torch.optim.Adam(self.second.parameters(), lr=0.01)]


def test_manual_optimization():
    train = partial(weighted, heavy=(5,))
    eager, other = both(Manual, train, settings=SMALL, logger=MemoryLogger, max_epochs=1)
    assert other.trainer.precision_plugin.skipped_steps == 2  # of both optimizers
    assert_follows(eager, other)
    # Lightning's own leaves them scaled until step() is called
    torch.testing.assert_close(other.module.norms[0], eager.module.norms[0] / 1024, rtol=0.02, atol=0)


class Penalized(Manual):
    """Gradients of gradients, which torch computes."""

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        one, two = self.optimizers()
        loss = (self.second(self.first(x).tanh()) - y).float().square().mean()
        self.manual_backward(loss, create_graph=True)
        penalty = self.first.weight.grad.square().sum()
        self.log("loss", loss)
        self.log("penalty", penalty)
        self.manual_backward(penalty)
        for optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()


def test_gradients_of_gradients():
    """They are those of unscaled gradients, as in float32; Lightning's own would have them scaled."""
    flags = {"logger": MemoryLogger, "max_epochs": 1}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward.* with create_graph=True")
        eager = fit(Penalized, weighted, strategy="auto", **flags)
        other = fit(Penalized, weighted, strategy="ort", plugins=lambda: [ort_plugin(init_scale=1024.0)], **flags)
    assert other.trainer.precision_plugin.skipped_steps == 0
    for name in ("loss", "penalty"):
        assert logged(other, name)[:10] == pytest.approx(logged(eager, name)[:10], rel=0.05)


class Listens:
    """A scaler of ORTTrainer's kind that notes what it is told."""

    def __init__(self) -> None:
        self.loss_scale, self.heard = 256.0, []

    def update(self, info: Any) -> None:
        self.heard.append((info.all_finite, info.optimization_step, info.step))
        self.loss_scale = 128.0 if not info.all_finite else self.loss_scale + 1


def test_scaler_of_another_kind():
    mine = Listens()
    run = fit(
        Weighted, partial(weighted, heavy=(2,)), strategy="ort", plugins=lambda: [ORTPrecision("16-mixed", mine)],
        max_steps=5,
    )  # fmt: skip
    assert mine.heard == [(True, 0, 0), (True, 1, 1), (False, 2, 2), (True, 2, 3), (True, 3, 4)]
    assert run.trainer.precision_plugin.scaling.scale == mine.loss_scale == 130.0


class Stubborn:
    """Keeps its scale where no checkpoint finds it."""

    def __init__(self) -> None:
        self._held = [512.0]

    @property
    def loss_scale(self) -> float:
        return self._held[0]

    def update(self, info: Any) -> None:
        self._held[0] /= 2


@pytest.mark.parametrize("make", [lambda: amp.DynamicLossScaler(loss_scale=1024.0, up_scale_window=5), Listens])
def test_scaler_of_another_kind_survives_a_checkpoint(make):
    first, second = ORTPrecision("16-mixed", make()), ORTPrecision("16-mixed", make())
    for finite in (True, False, True, True):
        first._rule.update(ScaledStep(finite, 0, 0))
    second.load_state_dict(first.state_dict())
    for finite in (True, True, True, False):
        assert second._rule.scale == first._rule.scale
        for plugin in (first, second):
            plugin._rule.update(ScaledStep(finite, 0, 0))
    assert second._rule.scale == first._rule.scale != make().loss_scale


def test_scaler_that_cannot_be_resumed():
    """Another kind, or one whose state is nowhere, is named instead of going on at a wrong scale."""
    state = ORTPrecision("16-mixed", amp.DynamicLossScaler()).state_dict()
    with pytest.raises(RuntimeError, match="another kind of scaler"):
        ORTPrecision("16-mixed", Stubborn()).load_state_dict(state)
    with pytest.raises(RuntimeError, match="another kind of scaler"):
        ORTPrecision("16-mixed").load_state_dict(state)
    first = ORTPrecision("16-mixed", Stubborn())
    first._rule.update(ScaledStep(False, 0, 0))
    with pytest.raises(RuntimeError, match="loss_scale is 512 and not 256"):
        ORTPrecision("16-mixed", Stubborn()).load_state_dict(first.state_dict())


def test_skipped_steps_are_logged_on_request():
    run = fit(
        Weighted, partial(weighted, heavy=(3,)), strategy="ort", plugins=lambda: [ort_plugin(log=True, **SMALL)],
        logger=MemoryLogger, max_steps=6,
    )  # fmt: skip
    assert logged(run, "loss_scale") == [1024.0] * 3 + [512.0] * 3
    assert logged(run, "skipped_steps") == [0, 0, 0, 1, 1, 1]


def test_scale_survives_a_checkpoint(tmp_path):
    """A run that is interrupted ends as one that is not, to the bit; Lightning's own plug-in can go on as well."""
    train = partial(weighted, heavy=(1,), batches=7)
    plugins = {"ort": lambda: [ort_plugin(**SMALL)], "auto": lambda: [eager_plugin(**SMALL)]}
    whole = fit(Weighted, train, strategy="ort", plugins=plugins["ort"], max_epochs=2)
    path = tmp_path / "half.ckpt"
    for first in ("ort", "auto"):
        fit(Weighted, train, strategy=first, plugins=plugins[first], max_epochs=1).trainer.save_checkpoint(path)
        for second in ("ort", "auto"):
            run = fit(Weighted, train, strategy=second, plugins=plugins[second], max_epochs=2, ckpt_path=path)
            plugin = run.trainer.precision_plugin
            if second == "ort":
                assert plugin.scaling.scale == whole.trainer.precision_plugin.scaling.scale
                assert plugin.skipped_steps == (2 if first == "ort" else 1)
            else:
                assert plugin.scaler.get_scale() == whole.trainer.precision_plugin.scaling.scale
            if first == second == "ort":
                for a, b in zip(run.module.parameters(), whole.module.parameters(), strict=True):
                    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("precision", "by_plugin"),
    [("16-true", False), ("bf16-true", False), ("16-true", True), ("32-true", True), ("64-true", True)],
)
def test_one_type_for_all(precision, by_plugin):
    flags = {"plugins": lambda: [ORTPrecision(precision)]} if by_plugin else {"precision": precision}
    eager = fit(MLP, partial(examples, MLP), strategy="auto", precision=precision, logger=MemoryLogger, max_steps=8)
    other = fit(MLP, partial(examples, MLP), strategy="ort", logger=MemoryLogger, max_steps=8, **flags)
    assert_follows(eager, other, relative=0.02 if "16" in precision else 1e-4)
    types = [{p.dtype for p in run.module.parameters()} for run in (eager, other)]
    assert types[0] == types[1]


def test_names_given_to_the_trainer():
    """Lightning itself turns 16-mixed into bf16-mixed where the accelerator is "cpu"."""
    with pytest.warns(UserWarning, match="16-mixed"):
        trainer = Trainer(strategy="ort", accelerator="cpu", precision="16-mixed", logger=False)
    assert isinstance(trainer.precision_plugin, ORTPrecision)
    assert trainer.precision == "bf16-mixed"
    with quiet():
        trainer = make_trainer("ort", plugins=[eager_plugin(init_scale=64.0)])
    assert trainer.precision == "16-mixed"
    assert trainer.precision_plugin.scaling.scale == 64.0


@pytest.mark.parametrize("precision", DTYPES)
def test_evaluation(precision):
    results = []
    for strategy, plugin in {"auto": eager_plugin, "ort": ort_plugin}.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        trainer, module = make_trainer(strategy, plugins=[plugin(precision)]), MLP()
        with quiet():
            results.append(trainer.predict(module, examples(MLP))[0])
    assert results[0].dtype == results[1].dtype == DTYPES[precision]
    torch.testing.assert_close(results[1], results[0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (("16",), ValueError, "precision='16'.*'16-mixed'"),
        (("bf16-mixed", scaler()), ValueError, "16-mixed"),
        (("16-mixed", 3.0), TypeError, "scaler=3.0.*GradScaler"),
    ],
)
def test_wrong_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        ORTPrecision(*arguments)


class Half(Weighted):
    """A loss of float16, whose gradient is the whole scale."""

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).abs().mean()
        self.log("loss", loss)
        return loss


class Divided(Weighted):
    """The loss is looked at, which ends the graph, and divided afterwards."""

    factor, varies = 1e-3, 0

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).float().square().sum()
        self.seen = loss.item()
        self.log("loss", loss)
        return loss * self.factor * (1 + 0.5 * self.varies * (batch_idx % 3))


class Multiplied(Divided):
    factor = 500.0


class Reversed(Divided):
    factor = -1e-3


class Varying(Divided):
    varies = 1


def scales(make: Callable, strategy: str, plugin: Any, accumulate: int) -> tuple[Run, list[float]]:
    seen = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer, *args):
            state = trainer.precision_plugin.state_dict()
            seen.append(state.get("scaler", state)["scale"])

    flags = {"callbacks": [Looks()], "max_epochs": 1, "accumulate_grad_batches": accumulate, "logger": MemoryLogger}
    return fit(make, partial(weighted, batches=12), strategy=strategy, plugins=lambda: [plugin], **flags), seen


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize(
    ("make", "scale"),
    [
        (Half, 2.0**16),
        (Half, 2.0**17),
        (Half, 2.0**14),
        (Divided, 2.0**15),
        (Multiplied, 2.0**10),
        (Reversed, 2.0**15),
        (Varying, 2.0**15),
    ],
)
def test_what_comes_after_a_graph_is_scaled_as_in_eager(make, scale, accumulate):
    """Steps that eager leaves out are left out, and no others: 16 bits overflow at the same scale."""
    eager, wanted = scales(make, "auto", eager_plugin(init_scale=scale), accumulate)
    other, found = scales(make, "ort", ort_plugin(init_scale=scale), accumulate)
    assert found == wanted
    assert_follows(eager, other)


@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
@pytest.mark.parametrize("factor", [1e-7, 1e3])
def test_a_scaler_of_the_users(factor, placement):
    """Around a step that torch has compiled: gradients are those of the scaled loss, neither zero nor infinite."""

    def gradients(compiled):
        torch.compiler.reset()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1)).to(ACCELERATOR)
        x = torch.randn(8, 12, device=ACCELERATOR)

        def step(x):
            with torch.autocast(ACCELERATOR, dtype=torch.float16):
                return factor * (net(x) - 1).float().square().mean()

        if compiled:
            step = torch.compile(step, backend="lightning_ort", options={"placement": placement})
        found = []
        for scale in (1.0, 1e-3 / factor, 1e-3 / factor, 0.5):
            net.zero_grad()
            (step(x) * scale).backward()
            found.append([p.grad / scale for p in net.parameters()])
        return found

    wanted, found = gradients(False), gradients(True)
    assert any(g.abs().max() > 0 and g.isfinite().all() for g in wanted[1])
    torch.testing.assert_close(found, wanted, rtol=0.03, atol=3e-3 * factor)
