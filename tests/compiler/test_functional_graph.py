"""Regions that change tensors are traced with account of it, and others without."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_ort.compiler import functional_graph


@pytest.fixture
def accounts(monkeypatch):
    """One entry per trace that kept account of changes."""
    made, real = [], functional_graph.dispatch_functionalize
    monkeypatch.setattr(functional_graph, "dispatch_functionalize", lambda *args: made.append(1) or real(*args))
    return made


def _named(x, mean, var):
    y = x * 1.0
    y.add_(mean.sum())
    y[:, 0] = 0
    return y.square().sum()


def _by_argument(x, mean, var):
    return F.dropout(F.threshold(x * 1.0, 0.1, 0.2, True), 0.0, True, True).square().sum() + mean.sum()


def _statistics(x, mean, var):
    return F.instance_norm(x[None], mean, var, use_input_stats=True, momentum=0.3).square().sum()


def _by_a_call_below(x, mean, var):
    return torch.nn.functional.batch_norm(x, mean, var, training=True, momentum=0.3).pow(3).sum()


def _buffers(x, mean, var):
    mean *= 0.5
    return (x * mean).sum()


def _nothing(x, mean, var):
    y = x.view(-1).view_as(x).detach().clone() + x.unsqueeze(0)[0]
    return F.gelu(y).matmul(torch.diag(var)).mean() + mean.sum()


CASES = [(_named, True), (_by_argument, True), (_statistics, True), (_by_a_call_below, True), (_buffers, True)]


@pytest.mark.parametrize(("function", "expected"), [*CASES, (_nothing, False)])
@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
def test_values_gradients_and_buffers_are_those_of_eager(function, expected, placement, accounts):
    data = torch.randn(6, 4, dtype=torch.float64)

    def results(f):
        x = data.clone().requires_grad_()
        buffers = [torch.full((4,), 0.25, dtype=torch.float64), torch.full((4,), 2.0, dtype=torch.float64)]
        if function is _statistics:
            buffers = [torch.full((6,), v, dtype=torch.float64) for v in (0.25, 2.0)]
        loss = f(x, *buffers)
        loss.backward()
        return [loss.detach(), x.grad, *buffers]

    compiled = torch.compile(function, backend="lightning_ort", options={"placement": placement})
    torch.testing.assert_close(results(compiled), results(function), rtol=1e-12, atol=1e-12)
    assert bool(accounts) == expected


def _scaled(x):
    return F.layer_norm(x * x.shape[0], (4,)).square().sum()


def _halves(x):
    return torch.cat(x.chunk(2)).square().sum()


@pytest.mark.parametrize(("function", "expected"), [(_scaled, False), (_halves, True)])
@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
def test_open_sizes_of_which_nothing_is_assumed(function, expected, placement, accounts, caplog):
    """A trace that would assume something, that halves have several rows say, ends before it does, without a word."""
    step = torch.compile(function, backend="lightning_ort", options={"placement": placement})
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for rows in (6, 4, 8):
        x = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        torch._dynamo.maybe_mark_dynamic(y, 0)
        (loss, found) = function(x), step(y)
        loss.backward()
        found.backward()
        torch.testing.assert_close([found, y.grad], [loss, x.grad], rtol=1e-12, atol=1e-12)
    assert bool(accounts) == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
    assert not caplog.records


def test_long_chains_of_sizes():
    """Sizes of which each follows from the one before it become nodes when the last is asked for."""

    def grown(x):
        for _ in range(60):
            x = torch.cat([x, x[:2] * 0.5])
        return (x * x.shape[0]).sum()

    compiled = torch.compile(grown, backend="lightning_ort", dynamic=True, options={"on_unsupported": "error"})
    for n in (3, 5):
        x = torch.randn(n, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), grown(x))


POWERS = {
    "tensor": lambda x: (-1) ** torch.arange(4) * x,
    "numbers": lambda x: (-2.0) ** torch.arange(4.0) * x,
    "size": lambda x: (-1) ** x.shape[0] * x,
    "zero": lambda x: 1 / (-0.0) ** x.abs().ceil() * x,
    "left to torch": lambda x: torch.bernoulli(torch.ones(4)) * (-1) ** torch.arange(4) * x,
}


@pytest.mark.parametrize("placement", ["onnxruntime", "torch", "fastest"])
@pytest.mark.parametrize("name", POWERS)
def test_powers_of_negative_numbers(name, placement):
    """torch.fx writes ``pow(-1, k)`` as ``-1 ** k``, which is something else."""
    step = POWERS[name]
    compiled = torch.compile(step, backend="lightning_ort", options={"placement": placement})
    for rows in (2, 3, 4, 5):
        x = torch.randn(rows, 4, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        expected, found = step(x), compiled(y)
        torch.testing.assert_close(found, expected)
        expected.sum().backward()
        found.sum().backward()
        torch.testing.assert_close(y.grad, x.grad, equal_nan=True)
