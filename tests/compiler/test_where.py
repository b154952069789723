"""Choices between two tensors: by ONNX Runtime's operator, or by products of their bits where that takes longer."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import fx

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.lowering import GraphBuilder
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.runtime.factory import SessionFactory
from lightning_ort.runtime.providers import cpu
from lightning_ort.runtime.tensors import NUMPY

pytestmark = pytest.mark.either_build
READS_BITS = tuple(int(n) for n in onnxruntime.__version__.split(".")[:2]) >= (1, 25)
FLOATS = (torch.float32, torch.float64) if READS_BITS else ()


def special(dtype: torch.dtype) -> torch.Tensor:
    """Numbers that arithmetic would change, 16 of them."""
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.tensor([info.min, info.max, -1, 0, 1, info.min + 1, 7, -7] * 2, dtype=dtype)
    info = torch.finfo(dtype)
    inf, nan = float("inf"), float("nan")
    return torch.tensor([nan, inf, -inf, 0.0, -0.0, info.max, info.min, info.smallest_normal / 4] * 2, dtype=dtype)


def written(builder: GraphBuilder, mask: torch.Tensor, *numbers: torch.Tensor) -> ir.Model:
    """The model of one choice between ``numbers``, of which scalars are constants."""
    graph = fx.Graph()
    values = []
    for i, x in enumerate((mask, *numbers)):
        if x.dim():
            node = graph.placeholder(f"x{i}")
            node.meta["val"] = x
            values.append(builder.add_input(node))
        else:
            values.append(builder.constant(x.numpy(), x.dtype))
    out = graph.placeholder("out")
    out.meta["val"] = torch.where(mask, *numbers)
    builder.define(out, builder.where(*values, numbers[0].dtype))
    return builder.model([out])


def chosen(model: ir.Model, *inputs: torch.Tensor) -> np.ndarray:
    session = cpu.cpu_session(ir.to_proto(model).SerializeToString())
    feed = {f"x{i}": x.numpy() for i, x in enumerate(inputs) if x.dim()}
    return session.run(None, feed)[0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, *FLOATS], ids=str)
@pytest.mark.parametrize("kind", ["both", "zero", "minus zero", "number", "row of a mask", "column and row"])
def test_bit_by_bit_what_where_gives(dtype: torch.dtype, kind: str) -> None:
    a, b = special(dtype), special(dtype).flip(0)
    mask = torch.tensor([True, False] * 4 + [False, True] * 4)
    if kind == "row of a mask":
        a, b = a.repeat(3, 1), b.repeat(3, 1)
    elif kind == "column and row":
        a, mask = a[:, None], mask.reshape(2, 1, 8).repeat(1, 16, 2)
    elif kind != "both":
        a = torch.tensor({"zero": 0, "minus zero": -0.0, "number": 3}[kind]).to(dtype)
    for first, second in ((a, b), (b, a)):
        model = written(GraphBuilder(by_bits={dtype}), mask, first, second)
        types = {node.op_type for node in model.graph}
        assert "Where" not in types
        assert ("BitCast" in types) == dtype.is_floating_point == (model.opset_imports[""] == 26)
        got = chosen(model, mask, first, second)
        assert got.tobytes() == np.where(mask, first, second).astype(NUMPY[dtype]).tobytes()


def test_of_two_zeros_and_of_other_types_the_operator_chooses() -> None:
    mask, zero = torch.tensor([True, False]), torch.tensor(0)
    for builder in (GraphBuilder(by_bits={torch.int64}), GraphBuilder()):
        model = written(builder, mask, zero, zero)
        assert "Where" in {node.op_type for node in model.graph}
        assert model.opset_imports[""] < 26
        assert chosen(model, mask, zero, zero).tolist() == [0, 0]
    model = written(GraphBuilder(by_bits={torch.int64}), mask, torch.ones(2), torch.zeros(2))
    assert "Where" in {node.op_type for node in model.graph}


@pytest.mark.parametrize(("times", "slow"), [(3, False), (20, True)])
def test_it_is_measured_which_is_slow(monkeypatch: pytest.MonkeyPatch, times: int, slow: bool) -> None:
    """The clock of five choices, then of five products."""
    durations = [1.0 * times] * 5 + [1.0] * 5
    ticks = itertools.chain.from_iterable((0.0, d) for d in durations)
    monkeypatch.setattr(cpu, "perf_counter", lambda: next(ticks))
    assert cpu.chooses_slowly.__wrapped__() == slow
    monkeypatch.setattr(cpu, "chooses_slowly", lambda: slow)
    expected = {torch.int32, torch.int64, *FLOATS} if slow else set()
    assert cpu.chosen_by_bits.__wrapped__() == expected


@pytest.mark.parametrize("only_cpu", [True, False])
def test_graphs_of_the_cpu_alone_choose_by_bits(monkeypatch: pytest.MonkeyPatch, only_cpu: bool) -> None:
    """Other providers have kernels of their own, and may not be able to read bits."""
    monkeypatch.setattr("lightning_ort.compiler.plan.chosen_by_bits", lambda: frozenset({torch.int64, *FLOATS}))
    monkeypatch.setattr(SessionFactory, "only_cpu", only_cpu)
    seen: list[ir.Model] = []
    make = SessionFactory.session

    def session(self: SessionFactory, model: bytes, **options: Any) -> Any:
        seen.append(ir.from_proto(onnx.load_from_string(model)))
        return make(self, model, **options)

    monkeypatch.setattr(SessionFactory, "session", session)
    dtype = torch.float32 if READS_BITS else torch.int64
    x, y = torch.arange(4).to(dtype), torch.arange(4, 8).to(dtype)
    step = torch.compile(
        lambda mask, x, y: torch.where(mask, x, y) * 2, backend=ORTBackend(RuntimeConfig(placement="onnxruntime"))
    )
    assert step(x % 2 == 0, x, y).tolist() == [0, 10, 4, 14]
    types = {node.op_type for model in seen for node in model.graph}
    assert ("Where" in types) != only_cpu


def test_a_masked_gradient_that_is_not_finite_is_dropped() -> None:
    """That of the root of a ReLU is infinite where that is 0, and not a number times a factor of 0."""

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x * w).sqrt() * w).sum()

    x = torch.tensor([[-1.0, 2.0, 0.0, -3.0]] * 8)
    results = []
    for function in (step, torch.compile(step, backend=ORTBackend(RuntimeConfig(placement="onnxruntime")))):
        w = torch.tensor([1.0, 0.5, 2.0, 4.0], requires_grad=True)
        (gradient,) = torch.autograd.grad(function(x, w), w)
        results.append(gradient)
    torch.testing.assert_close(results[1], results[0])
    assert results[0].isfinite().all()
