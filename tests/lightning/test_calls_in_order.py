"""What a step says to metrics, to its optimizers and to itself, where the order or the surroundings count."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule
from modules import FEATURES, curve
from parity import assert_fit_parity, make_trainer, quiet
from torch import nn
from torchmetrics import Metric, SumMetric
from torchmetrics.wrappers import BootStrapper

# what is done in torch and in Python, beside any ONNX Runtime
pytestmark = pytest.mark.stock_only


class Step(LightningModule):
    def __init__(self, optimizer=torch.optim.SGD, manual=False):
        super().__init__()
        self.net, self.optimizer, self.automatic_optimization = nn.Linear(FEATURES, 1), optimizer, not manual

    def loss(self, batch):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.01)


class Resampled(Step):
    """Draws for a metric before it draws for its dropout."""

    def __init__(self):
        super().__init__()
        self.sums, self.dropout = BootStrapper(SumMetric(), num_bootstraps=4), nn.Dropout(0.5)

    def training_step(self, batch, index):
        self.sums.update(batch[1].flatten())
        loss = self.loss((self.dropout(batch[0]), batch[1]))
        self.log("mean", self.sums.compute()["mean"])
        return loss


def test_a_metric_that_draws_random_numbers():
    assert_fit_parity(Resampled, curve, max_steps=8)


class Prefixed(Step):
    """Logs under names of its own making, and reads what it has logged."""

    def log(self, name, value, **kwargs):
        super().log(f"{self.prefix}/{name}", value, **kwargs)
        self.last = value.detach()

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.prefix = "first"
        self.log("loss", loss)
        self.prefix = "second"
        self.log_dict({"loss": 2 * loss})
        return loss * self.last.sqrt()


def test_a_module_that_logs_in_its_own_way():
    _, other = assert_fit_parity(Prefixed, curve, max_steps=8)
    assert set(other.trainer.callback_metrics) == {"first/loss", "second/loss"}


class LogsTwice(Step):
    """Logs several at once, then one of their names again, and then asks a metric."""

    def __init__(self):
        super().__init__()
        self.sums = SumMetric()

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log_dict({"last": 2 * loss, "other": -loss})
        self.log("last", loss)
        self.log_dict({"a": self.sums(batch[1].sum()), "b": loss})
        return loss


def test_several_values_are_logged_before_what_is_logged_after_them():
    eager, other = assert_fit_parity(LogsTwice, curve, max_steps=4)
    found = other.trainer.callback_metrics
    assert [*found] == [*eager.trainer.callback_metrics] == ["last", "other", "a", "b"]
    torch.testing.assert_close(found["last"], -found["other"])


class Gram(Metric):
    """Computes in the precision of its surroundings."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, x):
        self.total += (x @ x.T).float().sum()

    def compute(self):
        return self.total


class Autocast(Step):
    def __init__(self, inner):
        super().__init__()
        self.gram, self.inner, self.seen = Gram(), inner, []

    def training_step(self, batch, index):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.inner):
            self.gram.update(batch[0])
        return self.loss(batch)

    def on_train_batch_end(self, outputs, batch, index):
        self.seen.append(self.gram.total.item())


@pytest.mark.parametrize(("precision", "inner"), [("32-true", True), ("bf16-mixed", False)])
def test_a_metric_under_autocast_of_the_step(precision, inner):
    found = []
    for strategy in ("auto", "ort"):
        with quiet():
            trainer = make_trainer(strategy, precision=precision, max_steps=3)
            torch.manual_seed(0)
            trainer.fit(Autocast(inner), curve())
        found.append(trainer.lightning_module.seen)
    assert len(found[0]) == 3
    assert found[0] == found[1]


class WarmingUp(Step):
    """Sets the learning rate of its optimizer in the step."""

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (index + 1)
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_learning_rates_set_by_a_step(optimizer, manual):
    eager, other = assert_fit_parity(lambda: WarmingUp(optimizer, manual), curve, max_steps=6)
    groups = [run.trainer.optimizers[0].param_groups[0] for run in (eager, other)]
    assert groups[0].keys() == groups[1].keys()
    assert groups[0].get("capturable") == groups[1].get("capturable")
    assert groups[0]["lr"] == groups[1]["lr"]


class Copying(Step):
    """Makes weights where Lightning is in inference mode."""

    def on_validation_start(self):
        self.other = nn.Linear(FEATURES, 1)
        self.net.weight = nn.Parameter(torch.ones(1, FEATURES))

    def validation_step(self, batch, index):
        self.log("loss", self.loss(batch) + self.other(batch[0]).square().mean())


def test_weights_that_were_made_in_inference_mode():
    found = []
    for strategy in ("auto", "ort"):
        with quiet():
            trainer = make_trainer(strategy)
            torch.manual_seed(0)
            trainer.validate(Copying(), curve(), verbose=False)
        found.append(trainer.callback_metrics["loss"])
    torch.testing.assert_close(found[1], found[0])
