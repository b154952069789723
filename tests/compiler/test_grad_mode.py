"""Gradients that are switched on or off within a step, across graph breaks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo import graph_break

# what Dynamo and autograd make of it, whoever runs the graphs
pytestmark = pytest.mark.stock_only


def target_without_gradient(net, x):
    h = net(x)
    with torch.no_grad():
        target, weight = h[:, 0], net.weight.t()
    graph_break()
    return (h[:, 1] - target).square().mean() + (x @ weight).sum() * 0.1


def view_without_gradient_of_what_stays_inside(net, x):
    h = net(x)
    with torch.no_grad():
        target = h.chunk(2, -1)[0]
    loss = h.square().mean()
    graph_break()
    return loss + (target * x.sum()).tanh().mean() + x.mean()


def switched_by_a_statement(net, x):
    torch.set_grad_enabled(False)
    a = net(x)
    graph_break()
    b = net(x * 2)
    torch.set_grad_enabled(True)
    return (net(x) - a - b).square().mean()


def views_alone_between_breaks(net, x):
    h = net(x).tanh()
    graph_break()
    a = h[:, 0]
    graph_break()
    return a.sum() + h.square().mean()


STEPS = [
    target_without_gradient, view_without_gradient_of_what_stays_inside, switched_by_a_statement,
    views_alone_between_breaks,
]  # fmt: skip


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_gradients_switched_in_a_step(step, outside):
    """The step is called with gradients, or switches them on itself, as for forces in a validation."""

    def run(function):
        torch.manual_seed(0)
        net, x = nn.Linear(2, 2).double(), torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
        with torch.set_grad_enabled(outside):
            loss = function(net, x)
            assert torch.is_grad_enabled() == (outside or step is switched_by_a_statement)
        return [loss.detach(), *torch.autograd.grad(loss, [x, *net.parameters()], allow_unused=True)]

    def inside(net, x):
        with torch.enable_grad():
            return step(net, x)

    whole = step if outside or step is switched_by_a_statement else inside
    compiled = torch.compile(whole, backend="lightning_ort")
    for _ in range(2):
        for got, expected in zip(run(compiled), run(whole), strict=True):
            assert (got is None) == (expected is None)
            if expected is not None:
                torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("enabled", [True, False])
def test_gradients_left_switched(enabled):
    def step(x):
        y = x * 2
        torch.set_grad_enabled(enabled)
        return y + 1

    with torch.set_grad_enabled(not enabled):
        assert torch.equal(torch.compile(step, backend="lightning_ort")(torch.ones(3)), torch.full((3,), 3.0))
        assert torch.is_grad_enabled() == enabled


@pytest.mark.parametrize("on", [True, False])
def test_gradients_of_functions(on):
    """By ``torch.func``, of inputs that require none."""

    def step(x):
        value, pull = torch.func.vjp(lambda y: (y * y.sin()).sum(), x)
        return torch.func.grad(lambda y: (y * y.sin()).sum())(x) + pull(value)[0]

    x = torch.randn(3, 4)
    with torch.set_grad_enabled(on):
        torch.testing.assert_close(torch.compile(step, backend="lightning_ort")(x), step(x))


def test_gradients_of_functions_beside_those_of_autograd():
    """Two results, so that the forward pass is checked by itself, within autograd's own forward without gradients."""

    def step(x, y):
        t = torch.func.grad(lambda z: (z.sin() * z).sum())(y)
        other = x.square().mean()
        return t.tanh().sum() + other, other * t

    compiled = torch.compile(step, backend="lightning_ort", options={"verify": True})
    x, y = torch.randn(6, 4, requires_grad=True), torch.randn(3, requires_grad=True)

    def run(function):
        first, second = function(x, y)
        return [first.detach(), second.detach(), *torch.autograd.grad(first + second.sum(), [x, y])]

    for got, expected in zip(run(compiled), run(step), strict=True):
        torch.testing.assert_close(got, expected)


def _optimizers():
    yield lambda p: torch.optim.SGD(p, 0.1, momentum=0.5, foreach=False)
    yield lambda p: torch.optim.AdamW(p, 0.1)
    yield lambda p: torch.optim.RMSprop(p, torch.tensor(0.1), foreach=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*record_function")
@pytest.mark.parametrize("make", list(_optimizers()), ids=["sgd", "adamw", "rmsprop"])
def test_updates_compiled_by_the_user(make):
    """Dynamo keeps weights and moments with its graph, not among its inputs."""

    def run(compiled):
        p = torch.ones(3, dtype=torch.float64, requires_grad=True)
        optimizer = make([p])
        update = torch.compile(optimizer.step, backend="lightning_ort") if compiled else optimizer.step
        for i in range(4):
            p.grad = torch.full_like(p, i + 1.0)
            update()
        return [p.detach(), *[torch.as_tensor(v) for v in optimizer.state[p].values()]]

    for got, expected in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
