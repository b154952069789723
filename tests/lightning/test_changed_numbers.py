"""Numbers and arrays that change between steps: what a step computes of them, and what it leaves in them."""

from __future__ import annotations

import collections
import logging
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from modules import table
from parity import assert_fit_parity, assert_same_state, fit, state_of, step_report
from test_changed_objects import Choosing, Weighted
from torch import nn
from torch._dynamo.variables.builtin import BuiltinVariable

from lightning_ort.lightning_packages import pl

# what Dynamo watches, whoever runs the graphs
pytestmark = pytest.mark.stock_only


class Scheduled(pl.LightningModule):
    """A number that a graph holds goes up and down."""

    def __init__(self, loss_at):
        super().__init__()
        self.net, self.loss_at, self.phase = nn.Linear(12, 4), loss_at, 0

    def on_train_batch_start(self, batch, index):
        self.phase = index % 8

    def training_step(self, batch, index):
        loss = self.loss_at(self, self.net(batch[0]), index)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


SCHEDULES = {
    "huber, by index": lambda m, x, i: F.huber_loss(x, torch.zeros_like(x), delta=0.1 + 0.1 * (i % 3)),
    "huber, by attribute": lambda m, x, i: F.huber_loss(x, torch.zeros_like(x), delta=0.1 + 0.1 * min(m.phase, 2)),
    "huber, by step": lambda m, x, i: F.huber_loss(x, x * 0, delta=0.1 + 0.1 + 0.01 * min(m.global_step % 8, 5)),
    "dropout": lambda m, x, i: F.dropout(x, 0.1 + 0.01 * min(i, 5)).square().mean(),
    "label smoothing": lambda m, x, i: F.cross_entropy(x, x.argmin(1), label_smoothing=0.1 + 0.01 * min(m.phase, 5)),
    "share": lambda m, x, i: F.elu(x, alpha=0.1 + min(i, 5) / 7).square().mean(),
    "of a float": lambda m, x, i: F.huber_loss(x, x * 0, delta=0.1 + 0.1 * (i % 3) * float(m.net.in_features) / 12),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
def test_numbers_that_a_graph_holds(name, placement):
    """None is taken from another step, whatever range Dynamo knows of it."""
    from lightning_ort import ORTStrategy

    flags = {"max_epochs": 3, "precision": "64-true"}
    eager, other = (
        fit(lambda: Scheduled(SCHEDULES[name]), table, strategy=s, **flags)
        for s in ("auto", ORTStrategy(placement=placement))
    )
    for a, b in zip(eager.module.parameters(), other.module.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12)
    assert step_report(other.trainer, "training_step").graphs > 1


class Counts(Scheduled):
    """Arrays that a step changes in place, each once."""

    def __init__(self):
        super().__init__(None)
        self.rows, self.classes, self.of_names = np.zeros(4), np.zeros(4, int), {"x": np.zeros(2)}
        self.table, self.seen = np.zeros((4, 4)), collections.Counter()

    def training_step(self, batch, index):
        x, y = batch
        logits = self.net(x)
        self.rows += 0.3
        self.of_names["x"] += len(x)
        self.classes += np.bincount(y.numpy(), minlength=4)
        self.seen += collections.Counter(y.tolist())
        weights = torch.as_tensor(1 / (1 + self.classes), dtype=torch.float32)
        return F.cross_entropy(logits, y, weights) * (1 + float(self.rows[0] % 1))

    def validation_step(self, batch, index):
        x, y = batch
        found = self.net(x).argmax(1)
        self.table += np.histogram2d(y.numpy(), found.numpy(), bins=np.arange(5))[0]
        self.log("accuracy", float(np.trace(self.table) / self.table.sum()))


def test_arrays_that_steps_count_in(caplog):
    eager, other = (fit(Counts, table, table, strategy=s, max_epochs=2) for s in ("auto", "ort"))
    assert_same_state(state_of(eager.module), state_of(other.module), 1e-4)
    for name in ("rows", "classes", "table"):
        np.testing.assert_array_equal(getattr(other.module, name), getattr(eager.module, name))
    np.testing.assert_array_equal(other.module.of_names["x"], eager.module.of_names["x"])
    assert other.module.seen == eager.module.seen
    assert not [r for r in caplog.records if r.levelno > logging.WARNING], "a guard could not be made"


class Grows(Scheduled):
    def __init__(self):
        super().__init__(None)
        self.kept = np.ones(1)

    def on_train_batch_start(self, batch, index):
        self.kept = np.ones(1 + self.global_step // 6)

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean() * self.kept.size / self.kept.shape[0] ** 2 * self.kept.ndim


def test_sizes_of_arrays():
    assert_fit_parity(Grows, table, max_steps=12, recompilations=1)


def test_what_was_compiled_before_and_after():
    """Dynamo keeps what it calls for a builtin: neither is it taken from another's compilation, nor left to one."""

    def asks(thing, x):
        return x + 1 if isinstance(thing, Weighted) else x

    torch.compile(asks, backend="eager")(types.SimpleNamespace(), torch.ones(2))
    before = dict(BuiltinVariable.call_function_handler_cache)
    assert before
    _, other = assert_fit_parity(lambda: Choosing("absent name of a protocol"), table, max_steps=12)
    assert step_report(other.trainer, "training_step").graphs == 2
    assert BuiltinVariable.call_function_handler_cache == before
