"""Optimizers, schedulers, accumulation, clipping: Lightning's loops around an ONNX Runtime step."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import grad_norm
from modules import Classifier, Regressor, curve, table
from parity import STEPS, MemoryLogger, assert_fit_parity, fit, state_of
from torch.optim import lr_scheduler

pytestmark = pytest.mark.stock_only


class AnyOptimizer(Regressor):
    """A regressor with the optimizer of choice."""

    def __init__(self, optimizer, **arguments) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.arguments = arguments

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), **self.arguments)


@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
        (torch.optim.RMSprop, {"lr": 0.005, "momentum": 0.5, "centered": True}),
        (torch.optim.Adagrad, {"lr": 0.05}),
        (torch.optim.NAdam, {"lr": 0.01, "foreach": True}),
        (torch.optim.Rprop, {"lr": 0.001, "etas": (0.9, 1.1)}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_optimizer(optimizer, arguments):
    # Rprop looks at signs only; a gradient near zero that rounds to the other side moves a weight the other way.
    double = {"precision": "64-true"} if optimizer is torch.optim.Rprop else {}
    assert_fit_parity(partial(AnyOptimizer, optimizer, **arguments), curve, graphs=1, **double)


def test_lbfgs_calls_the_step_from_its_closure():
    """Curvature estimates amplify rounding, so this runs in double precision, to 1e-9."""
    make = partial(CountsSteps, torch.optim.LBFGS, lr=1, max_iter=2, line_search_fn="strong_wolfe")
    train = partial(curve, batch_size=96)
    eager, other = assert_fit_parity(make, train, precision="64-true", graphs=3)
    assert eager.module.calls > 2 * STEPS
    assert other.module.calls == eager.module.calls


class CountsSteps(AnyOptimizer):
    """Counts calls of the training step, in Python."""

    calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "flags",
    [
        {"accumulate_grad_batches": 4},
        {"accumulate_grad_batches": 4, "max_epochs": 20},  # epochs of 6 batches: a step of 4 and a step of 2
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
        {"gradient_clip_val": 0.05, "accumulate_grad_batches": 3, "max_epochs": 20},
    ],
    ids=lambda flags: "-".join(f"{value}" for value in flags.values()),
)
def test_accumulation_and_clipping(flags):
    """Momentum SGD, whose weights show the size of every gradient; norms are logged before clipping."""
    eager, _ = assert_fit_parity(LogsNorms, curve, logger=MemoryLogger, graphs=1, **flags)
    norms = [row["grad_2.0_norm_total"] for _, row in eager.trainer.logger.rows if "grad_2.0_norm_total" in row]
    assert len(norms) >= 40
    assert max(norms) > flags.get("gradient_clip_val", 0) * 2
    plain = fit(
        LogsNorms, curve, strategy="auto", **{"max_epochs": flags["max_epochs"]} if "max_epochs" in flags else {}
    )
    changed = (state_of(plain.module)["head.weight"] - state_of(eager.module)["head.weight"]).abs().max()
    assert changed > 1e-2, "the flags changed nothing"


class LogsNorms(Regressor):
    """Logs the norm of the gradients, as Lightning's documentation shows it."""

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self, norm_type=2))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Groups(Classifier):
    """Several groups: another learning rate for the head, no weight decay for biases and norms."""

    def configure_optimizers(self):
        decayed = [p for n, p in self.named_parameters() if p.ndim > 1 and not n.startswith("net.4")]
        others = [p for n, p in self.named_parameters() if p.ndim == 1 and not n.startswith("net.4")]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
            {"params": self.net[4].parameters(), "lr": 0.2, "weight_decay": 0.01},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        return [optimizer], [lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.8**epoch)]


def test_parameter_groups():
    eager, other = assert_fit_parity(Groups, table)
    rates = [group["lr"] for group in eager.trainer.optimizers[0].param_groups]
    assert rates[0] == pytest.approx(0.05 * 0.8**8)
    assert rates == [group["lr"] for group in other.trainer.optimizers[0].param_groups]


class Scheduled(Regressor):
    """A regressor with the scheduler configuration of choice."""

    def __init__(self, scheduler, config) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.config = config

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler(optimizer), **self.config}}


@pytest.mark.parametrize(
    ("scheduler", "config"),
    [
        (lambda o: lr_scheduler.StepLR(o, 2, 0.5), {}),
        (lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS), {"interval": "step"}),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 10), {"interval": "step", "frequency": 3}),
        (lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.1), {"monitor": "val_loss"}),
    ],
    ids=["StepLR by epoch", "OneCycleLR by step", "CosineAnnealingLR every third step", "ReduceLROnPlateau"],
)
def test_scheduler(scheduler, config):
    eager, other = assert_fit_parity(partial(Scheduled, scheduler, config), curve, partial(curve, 32, seed=1))
    (expected,) = [group["lr"] for group in eager.trainer.optimizers[0].param_groups]
    (rate,) = [group["lr"] for group in other.trainer.optimizers[0].param_groups]
    assert expected != pytest.approx(0.05)
    assert rate == pytest.approx(expected, rel=1e-12)


class Overrides(LightningModule):
    """Overrides the hooks of the optimization loop: warm-up by hand, clipping, zero_grad, scheduler step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 20:
            scale = min(1.0, float(self.trainer.global_step + 1) / 20)
            for group in optimizer.param_groups:
                group["lr"] = scale * 0.1

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.current_epoch > 1:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(epoch=self.current_epoch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [lr_scheduler.CosineAnnealingLR(optimizer, 20)]


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
def test_overridden_hooks():
    assert_fit_parity(Overrides, curve, graphs=1)


class NeverClears(Regressor):
    """No gradient clearing at all: gradients pile up from step to step."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)


def test_gradients_accumulate_when_never_cleared():
    assert_fit_parity(NeverClears, curve)
