"""Dictionaries of users' own classes, whose entries are attributes."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from modules import table
from parity import fit
from torch import nn

from lightning_ort.lightning_packages import pl

pytestmark = pytest.mark.stock_only  # what Dynamo watches, whoever runs the graphs


class AttrDict(dict):
    def __init__(self, *args, **entries):
        super().__init__(*args, **entries)
        self.__dict__ = self


class Output(OrderedDict):
    """As outputs of models are in transformers."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Counted(OrderedDict):
    def __init__(self, **entries):
        self.number = 0
        super().__init__(**entries)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.number += 1


def _attributes(module, loss):
    module.state.steps += 1
    output = AttrDict(loss=loss * module.state["steps"])
    output.extra = module.state["steps"]
    return output


def _entries(module, loss):
    module.state["steps"] += 1
    return loss * module.state.steps


def _made(module, loss):
    output = AttrDict()
    output.loss = loss
    return output


def _kept(module, loss):
    module.kept = Output(loss=loss.detach(), twice=2 * loss.detach())
    return loss


def _read(module, loss):
    output = Output(loss=loss, twice=2 * loss)
    return {"loss": output.loss + output.twice}


def _counted(module, loss):
    return loss * Counted(a=loss, b=loss).number


class Keeps(pl.LightningModule):
    def __init__(self, step):
        super().__init__()
        self.net, self.step, self.state, self.kept, self.seen = nn.Linear(12, 4), step, AttrDict(steps=0), None, []

    def training_step(self, batch, index):
        return self.step(self, self.net(batch[0]).square().mean())

    def on_train_batch_end(self, outputs, batch, index):
        self.seen.append((sorted(outputs), float(outputs["loss"].detach())))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


@pytest.mark.parametrize("step", [_attributes, _entries, _made, _kept, _read, _counted])
def test_entries_that_are_attributes(step):
    eager, other = (fit(lambda: Keeps(step), table, strategy=s, precision="64-true").module for s in ("auto", "ort"))
    assert [keys for keys, _ in other.seen] == [keys for keys, _ in eager.seen]
    assert [loss for _, loss in other.seen] == pytest.approx([loss for _, loss in eager.seen], rel=1e-9)
    assert other.state == eager.state
    if step is _kept:
        assert vars(other.kept).keys() == {"loss", "twice"}
        torch.testing.assert_close(other.kept.twice, eager.kept.twice, rtol=1e-9, atol=0)
