"""Functions of Python's that TorchDynamo computes otherwise, and that a step leaves to Python therefore."""

from __future__ import annotations

import itertools

import pytest
import torch
from lightning.pytorch import LightningModule
from parity import make_trainer
from torch import nn

from lightning_ort import ORTStrategy

pytestmark = pytest.mark.stock_only

STEPS = {
    "round of a number that changes": lambda module, i: [round(7 * i, -1), round(module.count, -2), round(1234, -2)],
    "round of fractions": lambda module, i: [round(2.675, 2), round(i / 3, 2), round(0.5), round(1.5)],
    "format": lambda module, i: [
        format(0.123456, ".2f"), format(7, "04"), format("a", ">4"), format(i, "03d"), format(i),
    ],
    "f-strings": lambda module, i: [
        f"{i:04d}", f"{i:5}|{module.count:,}", f"{i:05}", f"{i / 3:.3f}", f"{i!r:4}|", f"{i:x}", f"{i:0{3 + 1}d}",
        f"{i}", f"{module.rate:8}|{module.rate:.2e}", f"{i:>6}",
    ],
    "sets and generators": lambda module, i: [
        {1, 2, 3}.intersection(k for k in (2, 3)), {1}.union(map(abs, [-2])), {1, 2, 3}.difference(k for k in (2,)),
        {1, 2}.symmetric_difference(k for k in (2, 5)), {1, 2}.isdisjoint(k for k in (2, 5)), {1, 2}.union([3], (4,)),
    ],
    "repeat": lambda module, i: [
        [x * y for x, y in zip((1.0, 2.0, 3.0), itertools.repeat(7.0, times=2), strict=False)],
        list(itertools.repeat(i, 2)),
    ],
    "the order of a set": lambda module, i: [
        list({9, 8, 1, 33, 2}), [k + 1 for k in {9, 1, 5}], list(enumerate({7, 3})), tuple({10, 3, 7} | {1}),
        next(iter({7, 3})), list(frozenset([5, 4, 40])),
    ],
}  # fmt: skip


class Stepping(LightningModule):
    def __init__(self, step) -> None:
        super().__init__()
        self.net, self.step, self.count, self.rate, self.kept = nn.Linear(2, 1), step, 1234, 0.5, []

    def training_step(self, batch, index):
        self.kept.append(self.step(self, index))
        return self.net(batch).sum()

    def on_train_batch_end(self, *args):
        self.count += 61
        self.rate *= 1.5

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("name", STEPS)
def test_what_a_step_computes_in_python(name):
    kept = []
    for strategy in ("auto", ORTStrategy(print_report=False)):
        module = Stepping(STEPS[name])
        make_trainer(strategy, max_steps=4).fit(module, torch.utils.data.DataLoader(torch.ones(4, 2)))
        kept.append(repr(module.kept))
    assert kept[1] == kept[0]


def test_nothing_is_said_of_what_goes_another_way(caplog):
    """``max`` with a key, which Dynamo tries without first."""
    best = Stepping(lambda module, i: max({"a": 1.0, "b": 2.0}.items(), key=lambda pair: pair[1])[0])
    make_trainer(ORTStrategy(print_report=False), max_steps=1).fit(best, torch.utils.data.DataLoader(torch.ones(4, 2)))
    assert best.kept == ["b"]
    assert not [record for record in caplog.records if record.name.startswith("torch")]
