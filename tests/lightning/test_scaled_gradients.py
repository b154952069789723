"""Gradients of scaled losses that reach some of the parameters, or several times the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from modules import FEATURES, Classifier, table
from parity import needs_ort
from test_mixed_precision import both
from torch import nn

pytestmark = needs_ort


class TwoLosses(Classifier):
    """Each of them reaches some of the parameters, and both are results of one graph."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(FEATURES, 1)

    def training_step(self, batch, batch_idx):
        loss, other = F.cross_entropy(self(batch[0]), batch[1]), self.other(batch[0]).square().mean()
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.manual_backward(other)
        self.optimizers().step()


class OneLossBehindABreak(Classifier):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(FEATURES, 1)

    def training_step(self, batch, batch_idx):
        hidden, apart = self(batch[0]), self.other(batch[0]).square().mean()
        self.log("apart", apart.item())
        return F.cross_entropy(hidden, batch[1])


@pytest.mark.parametrize("module", [TwoLosses, OneLossBehindABreak])
def test_losses_that_reach_some_parameters(module):
    eager, other = both(module, table, max_steps=6)
    for name, value in eager.module.state_dict().items():
        torch.testing.assert_close(other.module.state_dict()[name], value, rtol=0.02, atol=0.002)


class InfiniteSum(TwoLosses):
    """Gradients that are finite each, and whose sum is not."""

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        for _ in range(2):
            self.manual_backward((self.net[4].bias * 3e38).sum() if batch_idx == 2 else self(batch[0]).square().mean())
        self.optimizers().step()


def test_sums_of_gradients_are_looked_at():
    eager, other = both(InfiniteSum, table, max_steps=6, settings={"init_scale": 1.0})
    for name, value in eager.module.state_dict().items():
        assert value.isfinite().all()
        torch.testing.assert_close(other.module.state_dict()[name], value, rtol=0.02, atol=0.002)
    assert other.trainer.precision_plugin.skipped_steps == 1
