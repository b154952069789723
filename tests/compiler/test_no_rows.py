"""Sizes that change, down to nothing: what is computed from them, and tensors without entries."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_ort.compiler import ORTBackend
from lightning_ort.compiler.lowering.registry import LOWERINGS
from lightning_ort.compiler.plan import _Planner, _Rejected
from lightning_ort.runtime.config import RuntimeConfig


def assert_like_eager(step, module: nn.Module, batches, **options):
    """Compare results and gradients of ``step`` for each of the batches, drawn from the same seed."""
    compiled = torch.compile(step, backend=ORTBackend(**{"on_unsupported": "error", **options}))
    for number, x in enumerate(batches):
        found = []
        for function in (step, compiled):
            torch.manual_seed(number)
            module.zero_grad()
            result = function(x)
            result.sum().backward()
            found.append([result.detach(), *[p.grad for p in module.parameters() if p.grad is not None]])
        assert len(found[0]) == len(found[1])
        for wanted, got in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


class Padded(nn.Module):
    """Writes into a part of an intermediate result: its gradient is laid out by the strides of that result."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(10, 8), nn.Linear(8, 1)

    def forward(self, ids):
        x = self.words(ids) * 1.0
        x[:, 0] = 0
        return self.out(x.tanh()).square().mean()


def test_a_number_without_an_onnx_form():
    module = Padded()
    assert_like_eager(module, module, [torch.randint(0, 10, shape) for shape in ((4, 7), (4, 9), (4, 2))])


def test_a_number_where_a_constant_is_needed(monkeypatch):
    """An operator that is written for constants runs in torch when a size is given to it, and the report says so."""

    def written_for_constants(g, node, x, diagonal):
        return g.op("Trilu", g.value(x), g.constant(int(diagonal), torch.int64), upper=0)

    monkeypatch.setitem(LOWERINGS, torch.ops.aten.tril.default, written_for_constants)
    net, reasons = nn.Linear(3, 3), []
    batches = [torch.randn(n, 3) for n in (3, 5, 8)]
    step = lambda x: net(x).tril(2 - x.shape[0]).sin()  # noqa: E731
    assert_like_eager(step, net, batches, on_unsupported="torch", on_fallback=reasons.extend)
    assert {r.reason for r in reasons} == {"aten.tril.default with a number that changes"}


def test_strides_are_those_of_eager():
    net = nn.Linear(4, 4)
    # of a size of which ONNX has no such function, and of a view, which is contiguous in ONNX Runtime
    step = lambda x: net(x) * (x.shape[0] >> 1) + net(x).t().stride(1)  # noqa: E731
    assert_like_eager(step, net, [torch.randn(n, 4) for n in (3, 5, 8)])


@pytest.mark.parametrize("stride", [(2, 3), (2, 1)], ids=["side by side", "overlapping"])
def test_channels_that_change(stride):
    """The groups of the convolution that adds overlapping windows are as many."""
    step = lambda x: F.fold(x, (5, 6), (2, 3), stride=stride)  # noqa: E731
    compiled = torch.compile(step, backend="lightning_ort", options={"verify": False})
    for rows, channels in ((2, 3), (4, 3), (4, 5)):
        x = torch.randn(rows, channels * 6, 2 * (1 + 3 // stride[1]))
        torch.testing.assert_close(compiled(x), step(x))


@pytest.mark.parametrize("target", ["call_function", "placeholder"])
def test_a_compilation_that_gets_nowhere_ends(monkeypatch, target):
    """Whatever ONNX Runtime rejects again and again is left to torch with the whole region."""
    attempts: list = []

    def compile_(self, segments):
        attempts.append(segments)
        assert len(attempts) < 10, "it would go on for ever"
        raise _Rejected({next(n for n in self._module.graph.nodes if n.op == target): "not today"})

    monkeypatch.setattr(_Planner, "_compile", compile_)
    reasons: list = []
    step = torch.compile(lambda x: x.sin().sum(), backend=ORTBackend(on_fallback=reasons.extend))
    x = torch.randn(3)
    torch.testing.assert_close(step(x), x.sin().sum())
    assert [(r.operator, r.reason) for r in reasons] == [("the whole region", "not today")]


def _network(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*layers)


def _class_loss(net: nn.Module):
    return lambda x: F.cross_entropy(net(x), torch.zeros(x.shape[0], dtype=torch.long))


def _square(net: nn.Module):
    return lambda x: net(x).square().sum()


def _of_part(net: nn.Module):
    """No row is chosen, and the loss is of all rows as well."""
    return lambda x: F.mse_loss(net(x[x[:, 0] > 100]), torch.zeros(0, 3), reduction="sum") + net(x).mean()


DENSE = (nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3))
EMPTY = {
    "dense": (_network(*DENSE), lambda net: net, lambda n: torch.randn(n, 6)),
    "classes": (_network(*DENSE), _class_loss, lambda n: torch.randn(n, 6)),
    "mask": (_network(*DENSE), _of_part, lambda n: torch.randn(n + 2, 6)),
    "images": (
        _network(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 3)),
        _square,
        lambda n: torch.randn(n, 2, 6, 6),
    ),
    "words": (_network(nn.Embedding(9, 6), nn.Dropout(0.5)), _square, lambda n: torch.randint(0, 9, (5, n))),
    "attention": (
        nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
        _square,
        lambda n: torch.randn(n, 5, 6),
    ),
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("sizes", [(0, 5, 7), (5, 7, 0)], ids=["first", "later"])
def test_no_rows(name, sizes):
    module, loss, make = EMPTY[name]
    assert_like_eager(loss(module), module, [make(n) for n in sizes])


@pytest.mark.parametrize("placement", ["fastest", "onnxruntime"])
def test_means_over_no_rows(placement):
    """The gradient of a mean is repeated for each row, of which there are none."""
    net = _network(nn.Linear(6, 3))
    step = lambda x: net(x).mean(0).sum() + net(x).sum()  # noqa: E731
    assert_like_eager(step, net, [torch.randn(n, 6) for n in (5, 0)], config=RuntimeConfig(placement=placement))


def test_extrema_of_no_rows():
    net = _network(nn.Linear(6, 3))
    step = lambda x: net(x).logsumexp(0) + net(x).median() + net(x).softmax(1).sum()  # noqa: E731
    assert_like_eager(step, net, [torch.randn(n, 6) for n in (5, 0)])
    compiled = torch.compile(lambda x: net(x).max(), backend="lightning_ort")
    with pytest.raises(RuntimeError, match="numel"):
        compiled(torch.randn(0, 6))


def test_no_rows_between_two_segments():
    """What torch computes for ONNX Runtime, and what it reads from there, may be empty as well."""
    net = _network(*DENSE)

    def step(x):
        y = net(x)
        return torch.linalg.det(y.unsqueeze(1) * torch.ones(3, 3) + torch.eye(3)).sum() + y.sum()

    fallbacks: list = []
    compiled = torch.compile(step, backend=ORTBackend(on_fallback=fallbacks.extend))
    for n in (0, 4, 6, 0):
        x = torch.randn(n, 6)
        net.zero_grad()
        compiled(x).backward()
        got = [p.grad for p in net.parameters()]
        net.zero_grad()
        step(x).backward()
        for gradient, p in zip(got, net.parameters(), strict=True):
            torch.testing.assert_close(gradient, p.grad, rtol=1e-4, atol=1e-5)
    assert fallbacks


def test_gradients_that_a_kernel_gives_as_the_input_itself():
    """The gradient of a cumulative extremum of nothing, in torch's kernel: adding to it is no change of the input."""

    @torch.compile(backend="lightning_ort")
    def step(x, y):
        largest = y.cummax(-1)[0]
        return (largest * 0.3).tanh().sum() + x.sum(), largest, torch.nn.functional.softsign(y)

    x, y = torch.ones(2, requires_grad=True), torch.zeros(0, 3, 4, requires_grad=True)
    loss, *others = step(x, y)
    for result in (*others, loss):
        (result.sum() * 0.3).backward(retain_graph=True)
    assert y._version == 0
    assert y.grad.shape == y.shape
    torch.testing.assert_close(x.grad, torch.full((2,), 0.3))


def test_what_is_written_into_nothing_changes_nothing():
    def step(x, y):
        x[::2].mul_(2)
        return x.sum() + y.sum()

    options = {"placement": "onnxruntime", "verify": False}
    x, y = torch.ones(5, 0), torch.ones(2)
    assert torch.compile(step, backend="lightning_ort", options=options)(x, y) == step(x, y)
