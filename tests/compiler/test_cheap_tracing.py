"""Sizes that were computed before, and garbage that waits, change nothing but how long a trace takes."""

from __future__ import annotations

import contextlib
import gc
import operator

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from lightning_ort.compiler import cheap_tracing, functional_graph
from lightning_ort.compiler.cheap_tracing import REMEMBERED, collecting_rarely, collecting_rarely_in_frames
from lightning_ort.compiler.exact_floats import replaced


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


def two_sizes(*hints: int) -> tuple[ShapeEnv, list[torch.SymInt]]:
    sizes = ShapeEnv()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(hints))
    made, *_ = sizes.create_symbolic_sizes_strides_storage_offset(
        torch.empty(hints, device="meta"), torch._dynamo.source.LocalSource("x"), symbolic_context=context
    )
    return sizes, list(made)


def _everything(a, b):
    values = [a + b, a - b, a * b, a // b, a + 3, 3 + a, 2 * b, b // 2, a * b + a, a + a - a]
    values += [torch.sym_max(a, b), torch.sym_min(a, 5)]
    values += [a == b, a != b, a < b, a <= 7, a > b, a >= 8, a * 1.5, 0.5 * b + a, a / b]
    return [(x.node.expr, x.node.hint, x.node.pytype, x.node.is_constant()) for x in values]


def test_what_is_computed_of_sizes():
    assert len(REMEMBERED) == len(cheap_tracing._OPERATIONS) + 2, "torch names an operation otherwise"
    _, (a, b) = two_sizes(7, 5)
    with replaced(REMEMBERED):
        found = [_everything(a, b) for _ in range(2)]
    _, others = two_sizes(7, 5)
    assert found == [_everything(*others)] * 2


def test_each_is_computed_once(monkeypatch):
    computed = []
    operations = [(owner, name) for owner, name, _ in REMEMBERED if name in cheap_tracing._OPERATIONS]
    for owner, name in operations:
        original = getattr(owner, name)
        counting = lambda self, other, original=original: computed.append(original.__name__) or original(self, other)  # noqa: E731
        counting.__name__ = name
        monkeypatch.setattr(owner, name, counting)
    sizes, (a, b) = two_sizes(7, 5)
    with replaced(REMEMBERED):
        products = [a * b for _ in range(5)]
        assert computed == ["mul"]
        # another hint, another environment and what was learnt meanwhile are something else
        _, (c, d) = two_sizes(8, 5)
        assert (c * d).node.hint == 40 and products[-1].node.hint == 35
        assert bool(a == 7)
        assert (a * b).node.expr == 7 * b.node.expr
    assert sizes.replacements
    assert [getattr(owner, name).__name__ for owner, name, _ in REMEMBERED] == [name for _, name, _ in REMEMBERED]


def test_what_is_a_number():
    sizes, (a, b) = two_sizes(7, 5)
    with replaced(REMEMBERED):
        three = a.node.wrap_int(3)
        assert a.node.wrap_int(3) is three is not a.node.wrap_int(4)
        assert (three.pytype, three.hint, three.constant, three.maybe_as_int()) == (int, 3, 3, 3)
        values = [a, a * b, a + 2, a // 2, torch.sym_max(a, b), a - b, a * 2 + 3 * b, a * 1.5]
        assert [x.node.maybe_as_int() for x in values] == [None] * len(values)
        assert [x.node.maybe_as_int() for x in (a - a + 4, 0 * a, (a + b) // (a + b))] == [4, 0, 1]
        # what stands for a number is known only when it is compared
        assert bool(a == 7)
        assert [x.node.maybe_as_int() for x in values[:3]] == [7, None, 9]
    assert sizes.replacements
    assert a.node.wrap_int(3) is not three


def test_a_graph_computes_a_size_once():
    def f(x):
        n = x.shape[0]
        return x.new_ones(n * 2).sum() + x.new_ones(n * 2 + 1).sum() + x.new_full((n * 2,), n * 2).mean()

    with replaced(REMEMBERED):
        module = make_fx(f, tracing_mode="symbolic")(torch.ones(5))
    assert [n.target for n in module.graph.nodes].count(operator.mul) == 1
    for size in (5, 3, 8):
        assert module(torch.ones(size)) == f(torch.ones(size))


class Text(nn.Module):
    """What computes with sizes most."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(20, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.filters = nn.Conv1d(8, 6, 3, padding=1)

    def forward(self, tokens):
        x = self.layer(self.words(tokens), src_key_padding_mask=tokens == 0)
        x = nn.functional.avg_pool1d(self.filters(x.transpose(1, 2)), 2, ceil_mode=True)
        half = x.shape[-1] // 2 + 1
        return (x[..., :half].sum() / (half * x.shape[0])).tanh() + x.new_ones(half, x.shape[0]).softmax(
            -1
        ).square().sum()


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 20, (n, t), generator=generator) for n, t in [(4, 9), (4, 12), (7, 10)]]


@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
def test_tensors_are_computed_the_same(monkeypatch, placement):
    graphs, real = [], functional_graph._graph

    def noted(*args, **kwargs):
        module = real(*args, **kwargs)
        graphs[-1].append([n.target for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)])
        return module

    def results():
        torch.manual_seed(0)
        model = Text()
        graphs.append([])
        step = torch.compile(model, backend="lightning_ort", dynamic=True, options={"placement": placement})
        losses = [step(tokens) for tokens in batches()]
        torch.stack(losses).sum().backward()
        return [x.detach() for x in losses] + [p.grad for p in model.parameters()]

    monkeypatch.setattr(functional_graph, "_graph", noted)
    monkeypatch.setenv("LIGHTNING_ORT_CACHE_DIR", "")
    found = results()
    torch.compiler.reset()
    monkeypatch.setattr(functional_graph, "REMEMBERED", [])
    torch.testing.assert_close(results(), found, rtol=0, atol=0)
    assert graphs[0] == graphs[1] != []


@pytest.mark.parametrize("before", [(700, 10, 10), (0, 10, 10), (90_000, 5, 5)])
def test_collecting_rarely(before):
    present = gc.get_threshold()
    gc.set_threshold(*before)
    try:
        with collecting_rarely(), collecting_rarely():
            inside = gc.get_threshold()
        after = gc.get_threshold()
    finally:
        gc.set_threshold(*present)
    first = max(before[0], cheap_tracing._OBJECTS) if before[0] else 0
    assert inside == (first, *before[1:])
    assert after == before


@pytest.mark.parametrize("fails", [False, True])
def test_only_while_dynamo_compiles(fails):
    before, seen = gc.get_threshold(), []

    def backend(module, inputs):
        seen.append(gc.get_threshold())
        if fails:
            raise RuntimeError("no")
        return module.forward

    def call():
        with contextlib.ExitStack() as stack:
            if fails:
                stack.enter_context(pytest.raises(torch._dynamo.exc.BackendCompilerFailed))
            torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))

    with collecting_rarely_in_frames():
        call()
        seen.append(gc.get_threshold())
    torch.compiler.reset()
    call()
    assert [first for first, *_ in seen] == [cheap_tracing._OBJECTS, before[0], before[0]]
    assert gc.get_threshold() == before
