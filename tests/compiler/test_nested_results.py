"""Gradients of one result by another one, which ``torch.autograd.grad`` is asked for in the middle of a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_ort.compiler.backend import ORTBackend


def by_what_is_computed(net, x):
    fake = x * net[0].weight.sum()
    d = net(fake)
    (g,) = torch.autograd.grad(d.sum(), fake, create_graph=True)
    return (g.norm(2, dim=1) - 1).square().mean() + d.mean()


def which_may_be_unused(net, x):
    h = net[:2](x)
    loss = h.square().mean() + (h * h.cos()).sum()
    (g,) = torch.autograd.grad(loss, h, create_graph=True, allow_unused=True)
    return loss if g is None else loss + g.square().sum()


def energy_and_forces(net, x):
    energy = net(x).sum(1)
    (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return energy.square().mean() + forces.square().mean()


def one_behind_the_other(net, x):
    a = net[0](x)
    b = a.tanh()
    loss = (a * b).mean() + b.exp().mean()
    grads = torch.autograd.grad(loss, [b, a], create_graph=True)
    return loss + sum(g.square().sum() for g in grads)


def beside_others(net, x):
    first = x.cumsum(1)
    second = first.relu()
    h = net(x)
    (g,) = torch.autograd.grad(h.square().sum(), h, create_graph=True)
    return first.mean() + second.square().mean() + g.square().mean() + h.mean()


def meta_learning(net, x):
    first = net(x).square().mean()
    names = [name for name, _ in net.named_parameters()]
    grads = torch.autograd.grad(first, list(net.parameters()), create_graph=True)
    adapted = [p - 0.1 * g for p, g in zip(net.parameters(), grads, strict=True)]
    second = torch.func.functional_call(net, dict(zip(names, adapted, strict=True)), (x,)).square().mean()
    grads = torch.autograd.grad(second, adapted, create_graph=True)
    adapted = [p - 0.1 * g for p, g in zip(adapted, grads, strict=True)]
    return first + torch.func.functional_call(net, dict(zip(names, adapted, strict=True)), (x,)).square().mean()


def changed_between(net, x):
    h = net(x)
    net.seen.add_(1)
    loss = (h * net.seen.clone()).square().mean()
    net.seen.mul_(2)
    (g,) = torch.autograd.grad(loss, h, create_graph=True)
    return loss + (g * net.seen).square().mean()


def under_autocast(net, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = net(x)
    loss = h.double().square().mean()
    (g,) = torch.autograd.grad(loss, h, create_graph=True)
    return loss + g.double().square().sum()


def changed_before_it_is_cut(net, x):
    a = net(x).exp()
    b = a.clone()
    b.sub_(a, alpha=0.5)
    h = a.cumsum(0)
    (g,) = torch.autograd.grad(h.square().sum(), h, create_graph=True)
    return b.mean() + g.mean()


def changed_behind_the_cut(net, x):
    h = net(x)
    b = x * 2
    loss = h.square().mean()
    b[:, 0].mul_(2.0)
    (g,) = torch.autograd.grad(loss, h, create_graph=True)
    return loss + g.square().sum() + b.sum()


def beside_a_transform(net, x):
    h = net(x)
    slopes = torch.func.vmap(torch.func.grad(lambda row: (row.sin() * row).sum()))(h)
    loss = (h * slopes).square().mean()
    (g,) = torch.autograd.grad(loss, h, create_graph=True)
    return loss + g.square().sum()


STEPS = [
    by_what_is_computed, which_may_be_unused, energy_and_forces, one_behind_the_other, beside_others,
    meta_learning, changed_between, changed_before_it_is_cut,
]  # fmt: skip


def _network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    net.register_buffer("seen", torch.ones((), dtype=torch.float64))
    return net


def _run(step, net):
    results = []
    for batch in (5, 5, 3):
        x = torch.randn(batch, 4, generator=torch.Generator().manual_seed(batch), dtype=torch.float64)
        x.requires_grad_()
        loss = step(net, x)
        found = torch.autograd.grad(loss, [x, *net.parameters()], allow_unused=True)
        results += [loss.detach(), *(torch.zeros(()) if g is None else g for g in found), net.seen.clone()]
    return results


@pytest.mark.parametrize("step", STEPS)
def test_gradients_of_one_result_by_another(step):
    torch._dynamo.reset()
    in_torch: list = []
    graphs: list = []
    backend = ORTBackend(on_fallback=in_torch.extend, on_graph=graphs.append)
    for got, expected in zip(
        _run(torch.compile(step, backend=backend), _network()), _run(step, _network()), strict=True
    ):
        torch.testing.assert_close(got, expected)
    assert len(graphs) >= 2 and not [f for f in in_torch if f.operator == "the whole region"]


@pytest.mark.parametrize(
    ("step", "reason"),
    [(under_autocast, "autocast"), (beside_a_transform, "torch.func"), (changed_behind_the_cut, "in place")],
)
def test_where_settings_change_on_the_way_they_are_torchs(step, reason):
    torch._dynamo.reset()
    in_torch: list = []
    compiled = torch.compile(step, backend=ORTBackend(on_fallback=in_torch.extend))

    def run(function):
        torch.manual_seed(0)
        net, x = nn.Linear(4, 2), torch.randn(5, 4, requires_grad=True)
        loss = function(net, x)
        return [loss.detach(), *torch.autograd.grad(loss, [x, *net.parameters()])]

    for got, expected in zip(run(compiled), run(step), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)
    assert reason in in_torch[0].reason
