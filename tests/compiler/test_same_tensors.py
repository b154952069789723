"""Results that are, in eager, a tensor which went in, or one that another result is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import graph_break

from lightning_ort.compiler import ORTBackend

DTYPE = torch.float64
SAME = {
    "contiguous": lambda p: p.contiguous(),
    "to": lambda p: p.to(DTYPE),
    "cpu": lambda p: p.cpu(),
    "double": lambda p: p.double(),
    "type_as": lambda p: p.type_as(p),
    "as_tensor": torch.as_tensor,
    "plus": lambda p: +p,
    "real": torch.real,
    "atleast_1d": torch.atleast_1d,
    "dropout in evaluation": nn.Dropout(0.5).eval(),
    "dropout of nothing": lambda p: F.dropout(p, 0.0),
    "torch.dropout": lambda p: torch.dropout(p, 0.5, False),
}


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(DTYPE)


def _both(step):
    """Results and gradients of ``step(net, x)``, in eager and in regions."""
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        net = _network()
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=DTYPE)
        results = (torch.compile(step, backend=ORTBackend()) if compiled else step)(net, x)
        loss = results[0] if isinstance(results, tuple) else results
        loss.backward()
        found.append((net, results))
    return found


def _assert_as_in_eager(step):
    (eager, expected), (net, loss) = _both(step)
    torch.testing.assert_close(loss, expected)
    for p, q in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("same", SAME.values(), ids=SAME.keys())
def test_an_input_that_is_given_back_is_that_input(same):
    def step(net, x):
        return net(x).square().mean(), same(net[0].weight), same(x), x

    for net, (_, weight, given, x) in _both(step):
        assert weight is net[0].weight and weight.is_leaf and weight.grad is not None
        assert given is x


@pytest.mark.parametrize("same", SAME.values(), ids=SAME.keys())
def test_gradients_by_weights_that_are_given_back(same):
    def step(net, x):
        loss = net(x).square().mean()
        weights = [same(p) for p in net.parameters()]
        grads = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        return loss + sum(g.square().sum() for g in grads if g is not None)

    _assert_as_in_eager(step)


@pytest.mark.parametrize("same", SAME.values(), ids=SAME.keys())
def test_gradients_by_an_activation_under_another_name(same):
    def step(net, x):
        h = net[1](net[0](x))
        loss = net[2](h).square().mean()
        (g,) = torch.autograd.grad(loss, same(h), create_graph=True)
        return loss + g.square().sum()

    _assert_as_in_eager(step)


@pytest.mark.parametrize("same", SAME.values(), ids=SAME.keys())
def test_a_result_that_is_given_twice_is_one_tensor(same):
    def step(net, x):
        h = net(x)
        v = h[0]
        return h.square().mean(), h, same(h), v, same(v), h.view_as(h)

    for _, (_, h, again, v, v_again, view) in _both(step):
        assert again is h and v_again is v and view is not h
        again.data.fill_(3.0)
        assert (view == 3.0).all()


def test_an_optimizer_over_what_is_given_back():
    def step(net, x):
        loss = net(x).square().mean()
        weights = [p.to(x.dtype) for p in net.parameters()]
        graph_break()
        torch.optim.SGD(weights, 0.5)
        return loss

    _both(step)


def test_without_gradients_what_is_given_back_can_be_changed():
    def step(net, x):
        with torch.no_grad():
            weight = net[0].weight.contiguous()
        graph_break()
        with torch.no_grad():
            weight.mul_(0.5)
        return net(x).square().mean(), weight

    (eager, (expected, _)), (net, (loss, weight)) = _both(step)
    assert weight is net[0].weight
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(net[0].weight, eager[0].weight)


def test_what_is_changed_in_place_is_given_once():
    def step(net, x):
        h = net(x)
        y = h.mul_(2.0)
        z = F.relu(h, True)
        return z.square().mean(), h, y, z

    results = []
    for net, (loss, h, y, z) in _both(step):
        assert h is y and z is h
        results.append((loss, h, net[0].weight.grad))
    torch.testing.assert_close(*results)
