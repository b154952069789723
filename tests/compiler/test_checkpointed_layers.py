"""Layers under ``torch.utils.checkpoint``: the random numbers and running statistics of eager."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ort.compiler import ORTBackend

BODIES = {
    "dropout": lambda: nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 8)),
    # eager updates its statistics twice, the second time when the gradients are computed
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8)),
}


@pytest.mark.parametrize("ends_in_loss", [True, False], ids=["loss", "logits"])
@pytest.mark.parametrize("body", BODIES)
def test_trains_as_in_eager(body, ends_in_loss):
    torch.manual_seed(0)
    start = BODIES[body]().double()
    batches = [(torch.randn(4, 6, dtype=torch.float64), torch.randint(8, (4,))) for _ in range(3)]
    ends = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(1)
        net, fallbacks = copy.deepcopy(start), []

        def step(x, y, net=net):
            logits = checkpoint(net.forward, x, use_reentrant=False)
            return F.cross_entropy(logits, y) if ends_in_loss else logits

        if compiled:
            step = torch.compile(step, backend=ORTBackend(on_fallback=fallbacks.extend))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for x, y in batches:
            optimizer.zero_grad()
            result = step(x, y)
            loss = result if ends_in_loss else F.cross_entropy(result, y)
            loss.backward()
            optimizer.step()
        ends.append([torch.get_rng_state(), loss.detach(), *net.state_dict().values()])
    (random_state, *expected), (other_random_state, *actual) = ends
    assert torch.equal(random_state, other_random_state)
    for got, wanted in zip(actual, expected, strict=True):
        assert (got - wanted).abs().max() <= 1e-12 * wanted.abs().max()
    if body == "batch norm":
        assert net[1].num_batches_tracked == 6
    else:
        assert not fallbacks


def test_called_through_its_module_it_breaks_no_graph():
    """Where onnxruntime-training has put a function of its own."""
    net, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), torch.randn(4, 6)

    def step(x):
        return torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False).square().sum()

    step(x).backward()
    wanted = [p.grad for p in net.parameters()]
    net.zero_grad()
    torch.compile(step, backend=ORTBackend(), fullgraph=True)(x).backward()
    torch.testing.assert_close([p.grad for p in net.parameters()], wanted)
