"""Numbers and arrays that change between steps: what a step computes of them, and what it leaves in them."""

from __future__ import annotations

import collections
import logging
import math
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


class Decided(Scheduled):
    """The last digit of a float decides, or is kept."""

    def __init__(self, factor_of):
        super().__init__(None)
        self.factor_of, self.count, self.part, self.kept = factor_of, 0, 0.0, []

    def training_step(self, batch, index):
        self.count += 1
        self.part += 0.1
        factor = self.factor_of(self)
        self.kept.append(factor)
        return (self.net(batch[0]) * factor).square().mean()


LAST_DIGITS = {
    "at least": lambda m: 2.0 if m.part * 10 >= m.count else 1.0,
    "equal": lambda m: 2.0 if m.part * 3 - m.part == 2 * m.part else 1.0,
    "difference": lambda m: 2.0 if (m.part + 0.1) - m.part == 0.1 else 1.0,
    "whole": lambda m: int((1 - m.count / 10) * 10),
    "whole, of steps": lambda m: int((1 - m.global_step / 10) * 10),
    "whole, of a product": lambda m: int((1 - m.count * 0.1) * 10),
    "floor": lambda m: float(math.floor(m.part * 10)),
    "product": lambda m: 0.3 * (0.9 * m.part) + abs(m.part - m.count * 0.1),
    "square": lambda m: (m.part * 3) ** 2 - 9 * m.part**2 + 1,
    "exp": lambda m: math.exp(-5 * (1 - min(m.global_step / 10, 1)) ** 2),
    "log": lambda m: math.log(1 + m.count) + math.log(1 + m.part),
    "type of the least": lambda m: min(1, m.count / 5),
    "type of the largest": lambda m: max(1, m.count / 5),
    "more than 64 bits": lambda m: (2 ** (55 + m.count) % 7) / 7,
    "tokens seen": lambda m: ((3 << 32) + m.count * 1000 - (3 << 32)) / 1e4,
    "a product of more": lambda m: (m.count * 6364136223846793005 + 1) % 2**64 / 2**64,
    "a whole of more": lambda m: (int(1e17 * 10**m.count) % 7) / 7,
    "others": lambda m: math.log1p(m.part) + math.expm1(-m.part) + math.erf(m.part) + math.log10(m.count),
}


@pytest.mark.parametrize("name", LAST_DIGITS)
def test_floats_are_computed_as_python_computes_them(name):
    """Symbols would be simplified: ``(1 - k / 10) * 10`` to ``10 - k``, which is another number in its last digit."""
    from lightning_ort import ORTStrategy

    eager, other = (
        fit(lambda: Decided(LAST_DIGITS[name]), table, strategy=s, max_epochs=3, precision="64-true")
        for s in ("auto", ORTStrategy(placement="onnxruntime"))
    )
    assert other.module.kept == eager.module.kept
    assert [*map(type, other.module.kept)] == [*map(type, eager.module.kept)]
    assert len({*eager.module.kept}) > 1
    for a, b in zip(eager.module.parameters(), other.module.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12)
    step = step_report(other.trainer, "training_step")
    assert step.graphs <= 3 or "more" in name
    assert not step.in_torch or "more" in name


ERRORS = {
    "quotient of floats": (ZeroDivisionError, lambda m: 1 / (3.0 - m.count)),
    "quotient of integers": (ZeroDivisionError, lambda m: 1 / (3 - m.count)),
    "remainder": (ZeroDivisionError, lambda m: 5 % (3 - m.count)),
    "power": (ZeroDivisionError, lambda m: (3.0 - m.count) ** -1),
    "exp": (OverflowError, lambda m: math.exp(1e4 * (m.count - 3) + 720)),
    "log": (ValueError, lambda m: math.log(3 - m.count)),
    "sqrt": (ValueError, lambda m: math.sqrt(2.5 - m.count)),
    "acos": (ValueError, lambda m: math.acos(m.count / 2)),
    "shift": (ValueError, lambda m: 1 << (2 - m.count)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_numbers_without_a_value_are_errors(name):
    """A graph that was made for another number would go on with infinity, and the weights be NaN."""
    error, factor_of = ERRORS[name]
    modules = []

    def make():
        modules.append(Decided(factor_of))
        return modules[-1]

    for strategy in ("auto", "ort"):
        with pytest.raises(error):
            fit(make, table, strategy=strategy, precision="64-true")
    eager, other = modules
    assert other.count == eager.count == 3
    assert other.kept == eager.kept
    torch.testing.assert_close(other.net.weight, eager.net.weight, rtol=1e-9, atol=1e-12)


OPEN = {
    "leaky_relu": lambda m, x, i: F.leaky_relu(x, 0.3 * m.part).square().mean(),
    "clamp": lambda m, x, i: x.clamp(-m.part, 2 * m.part).square().mean(),
    "pow": lambda m, x, i: (x.abs() + 0.1).pow(1 + m.part).mean(),
    "lerp": lambda m, x, i: torch.lerp(x, x.flip(0), m.part).square().mean(),
    "elu": lambda m, x, i: F.elu(x, alpha=m.part).square().mean(),
    "softplus": lambda m, x, i: F.softplus(x, beta=1 + m.part).mean(),
    "pow of a count": lambda m, x, i: (0.1 * x).pow(1 + m.global_step % 4).mean(),
}


class Open(Scheduled):
    def on_train_batch_start(self, batch, index):
        self.part = 0.9 ** (self.global_step + 1)


@pytest.mark.parametrize("name", OPEN)
@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
def test_numbers_of_operators_stay_open(name, placement):
    """Nothing is compiled again for each of their values."""
    from lightning_ort import ORTStrategy

    eager, other = (
        fit(lambda: Open(OPEN[name]), table, strategy=s, max_epochs=3, precision="64-true")
        for s in ("auto", ORTStrategy(placement=placement))
    )
    for a, b in zip(eager.module.parameters(), other.module.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12)
    step = step_report(other.trainer, "training_step")
    assert step.graphs <= 2
    assert not step.in_torch


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
