"""Optimizers in Trainer.fit with ``ORTStrategy(optimizer="ort")``: hooks, clipping, accumulation, checkpoints."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from modules import Regressor, curve
from parity import assert_same_outcome, assert_same_state, fit, make_trainer, needs_ort, quiet, state_of
from test_manual_optimization import GAN

from lightning_ort import ORTPrecision, ORTStrategy, UnsupportedError
from lightning_ort.report import OptimizerReport

pytestmark = needs_ort
ort = partial(ORTStrategy, optimizer="ort", print_report=False)


def optimizers_of(run) -> list[OptimizerReport]:
    return run.trainer.strategy.report().optimizers


class Grouped(Regressor):
    """Two groups, a schedule of rates and momenta per step, and a hook of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def configure_optimizers(self):
        groups = [{"params": self.body.parameters(), "weight_decay": 0.1}, {"params": self.head.parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
        optimizer.register_step_post_hook(self.count)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.05], total_steps=60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def count(self, optimizer, args, kwargs):
        assert len(optimizer.param_groups) == 2
        self.seen += 1


def test_a_checkpoint_of_one_goes_on_under_the_other(tmp_path):
    flags = {"max_steps": 51, "accumulate_grad_batches": 2, "gradient_clip_val": 0.3, "enable_checkpointing": True}

    def saving(folder):
        return lambda: ModelCheckpoint(tmp_path / folder, every_n_epochs=8, save_top_k=-1, filename="{step}")

    eager = fit(Grouped, curve, strategy="auto", callbacks=saving("eager"), **flags)
    resumed = fit(
        Grouped, curve, strategy="auto", ckpt_path=tmp_path / "eager" / "step=24.ckpt", callbacks=saving("c"), **flags
    )
    other = fit(Grouped, curve, strategy=ort(), callbacks=saving("ort"), **flags)
    onwards = fit(
        Grouped, curve, strategy=ort(), ckpt_path=tmp_path / "eager" / "step=24.ckpt", callbacks=saving("a"), **flags
    )
    back = fit(
        Grouped, curve, strategy="auto", ckpt_path=tmp_path / "ort" / "step=24.ckpt", callbacks=saving("b"), **flags
    )
    for run, reference in ((other, eager), (onwards, resumed), (back, resumed)):
        assert_same_state(state_of(reference.module), state_of(run.module), 1e-5)
        assert run.trainer.global_step == 51
    assert eager.module.seen == other.module.seen == 51
    (report,) = optimizers_of(other)
    assert (report.name, report.in_ort, report.in_torch, report.graphs) == ("AdamW", 51, 0, 1)
    assert optimizers_of(onwards)[0].in_ort == 27
    text = str(other.trainer.strategy.report())
    assert "Optimizer updates" in text and "AdamW" in text


def test_gan():
    eager = fit(GAN, curve, strategy="auto", max_epochs=4)
    other = fit(GAN, curve, strategy=ort(), max_epochs=4)
    assert_same_outcome(eager, other, 1e-4)
    assert [(o.name, o.in_ort, o.in_torch) for o in optimizers_of(other)] == [("SGD", 24, 0), ("RMSprop", 24, 0)]


class Raw(Regressor):
    """Steps torch's optimizer itself, past Lightning and the strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(F.mse_loss(self(batch[0]), batch[1]))
        optimizer.step()


def test_optimizers_that_are_stepped_past_the_strategy():
    eager, other = (fit(Raw, curve, strategy=strategy, max_epochs=8) for strategy in ("auto", ort()))
    assert_same_outcome(eager, other, 1e-4)
    assert optimizers_of(other)[0].in_ort == 48


@pytest.mark.parametrize(
    "callbacks", [partial(StochasticWeightAveraging, 0.02, 2), WeightAveraging], ids=["swa", "ema"]
)
def test_averages(callbacks):
    eager = fit(Regressor, curve, strategy="auto", max_epochs=4, callbacks=callbacks)
    other = fit(Regressor, curve, strategy=ort(), max_epochs=4, callbacks=callbacks)
    assert_same_outcome(eager, other, 1e-4)
    assert optimizers_of(other)[0].in_ort == 24


def test_skipped_steps_are_no_updates():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1000)
    plugin = ORTPrecision("16-mixed", scaler)
    run = fit(Regressor, curve, strategy=ort(), plugins=[plugin], max_steps=30)
    (report,) = optimizers_of(run)
    optimizer = run.trainer.optimizers[0]
    assert plugin.skipped_steps > 5 and report.in_ort == 30 - plugin.skipped_steps and report.in_torch == 0
    assert {float(state["step"]) for state in optimizer.state.values()} == {float(report.in_ort)}


class Lookahead(torch.optim.Optimizer):
    """Wraps another one, as it is often written: without ``Optimizer.__init__``, so that it has no hooks."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
        self.defaults = inner.defaults
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def step(self, closure=None):
        loss = self.inner.step(closure)
        for group, kept in zip(self.param_groups, self.slow, strict=True):
            for p, slow in zip(group["params"], kept, strict=True):
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)
        return loss

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


class Wrapped(Regressor):
    def configure_optimizers(self):
        return Lookahead(torch.optim.SGD(self.parameters(), 0.1))


class LookaheadWithDictionaries(Lookahead):
    """Has what Lightning looks for, in which torch can keep no hook."""

    def __init__(self, inner):
        super().__init__(inner)
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}


class WrappedWithDictionaries(Regressor):
    def configure_optimizers(self):
        return LookaheadWithDictionaries(torch.optim.SGD(self.parameters(), 0.1))


def test_an_optimizer_that_has_dictionaries_for_hooks():
    eager = fit(WrappedWithDictionaries, curve, strategy="auto", max_epochs=4)
    other = fit(WrappedWithDictionaries, curve, strategy=ORTStrategy(), max_epochs=4)
    assert_same_outcome(eager, other, 1e-4)


def test_an_optimizer_without_hooks():
    eager = fit(Wrapped, curve, strategy="auto", max_epochs=4)
    other = fit(Wrapped, curve, strategy=ORTStrategy(), max_epochs=4)
    assert_same_outcome(eager, other, 1e-4)
    (report,) = optimizers_of(other)
    assert "Lookahead is not known" in report.reasons[0].reason
    with pytest.raises(UnsupportedError, match="Lookahead cannot be updated in ONNX Runtime"):
        fit(Wrapped, curve, strategy=ORTStrategy(optimizer="ort", on_unsupported="error"), max_steps=1)


class Newton(Regressor):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def test_lbfgs_stays_in_torch():
    eager = fit(Newton, curve, strategy="auto", max_steps=8)
    other = fit(Newton, curve, strategy=ort(), max_steps=8)
    assert_same_outcome(eager, other, 1e-3)
    (report,) = optimizers_of(other)
    assert report.in_ort == 0 and report.in_torch == 8
    text = str(other.trainer.strategy.report())
    assert "LBFGS in torch: torch.optim.lbfgs.LBFGS is not known" in text and "Optimizer updates" not in text
    with pytest.raises(UnsupportedError, match=r"LBFGS cannot be updated in ONNX Runtime, as optimizer='ort' with"):
        fit(Newton, curve, strategy=ort(on_unsupported="error"), max_steps=1)


def test_the_choice_of_auto_is_reported():
    strategy = ORTStrategy(print_report=False)
    run = fit(Regressor, curve, strategy=strategy, max_steps=2)
    (report,) = optimizers_of(run)
    assert (report.in_ort, report.in_torch) == (0, 2)
    assert [entry.reason for entry in report.reasons] == ["optimizer='auto': nothing is measured here"]

    trainer = make_trainer(ORTStrategy(optimizer="torch", print_report=False), max_steps=2)
    with quiet():
        trainer.fit(run.module, curve())
    assert trainer.strategy.report().optimizers == []
    assert not run.trainer.optimizers[0]._optimizer_step_pre_hooks, "hooks stay when a fit has ended"
    with pytest.raises(ValueError, match="optimizer='adam': expected 'auto', 'torch' or 'ort'"):
        ORTStrategy(optimizer="adam")


def test_other_optimizers_in_the_middle():
    """As a learning rate finder does, or a callback."""
    run = fit(Regressor, curve, strategy=ort(), max_steps=1)
    strategy = run.trainer.strategy
    first, second = (torch.optim.SGD(run.module.parameters(), 0.1) for _ in range(2))
    for optimizers, hooked in (([first], (1, 0)), ([second, first], (1, 1)), ([second], (0, 1)), ([], (0, 0))):
        strategy.optimizers = optimizers
        strategy.optimizers = optimizers
        assert tuple(len(o._optimizer_step_pre_hooks) for o in (first, second)) == hooked
