"""Sums, means, extrema and other results over whole dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, is_on_cpu, rank_of, shape_of
from lightning_ort.compiler.lowering.elementwise import exponential, square_root
from lightning_ort.compiler.lowering.registry import NotLowered, lowers
from lightning_ort.compiler.lowering.shapes import is_empty
from lightning_ort.compiler.lowering.sums import averaged, summed

aten = torch.ops.aten


def axes_of(dim: Any, rank: int) -> list[int]:
    """The reduced dimensions; ``None`` and an empty list mean all of them, as in torch."""
    dims = [dim] if isinstance(dim, int) else list(dim or [])
    return sorted({d % max(rank, 1) for d in dims}) if dims else list(range(rank))


def reduced(g: GraphBuilder, op_type: str, value: ir.Value, axes: Sequence[int], keepdim: bool = False) -> ir.Value:
    """One ONNX reduction over ``axes``, none meaning none."""
    if not axes:
        return value
    return g.op(op_type, value, g.ints(axes), keepdims=int(keepdim))


def _axes(x: fx.Node, dim: Any) -> list[int]:
    return axes_of(dim, rank_of(x)) if rank_of(x) else []


def _counting_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point or dtype in (torch.int32, torch.int64) else torch.int64


def _sum_in(x: fx.Node, node: fx.Node) -> torch.dtype:
    """The type to add up in: the result's, widened where ONNX Runtime cannot."""
    return _counting_dtype(dtype_of(node))


@lowers(aten.sum.dim_IntList)
def sum_(
    g: GraphBuilder, node: fx.Node, x: fx.Node, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> ir.Value:
    wide = _sum_in(x, node)
    total = summed(g, g.operand(x, wide), shape_of(x), _axes(x, dim), wide, keepdim)
    return g.cast(total, wide, dtype_of(node))


@lowers(aten.sum.default)
def sum_all(g: GraphBuilder, node: fx.Node, x: fx.Node, *, dtype: Any = None) -> ir.Value:
    return sum_(g, node, x)


@lowers(aten.mean.dim)
def mean(
    g: GraphBuilder, node: fx.Node, x: fx.Node, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> ir.Value:
    return _mean(g, x, dtype_of(node), _axes(x, dim), keepdim)


def _mean(g: GraphBuilder, x: fx.Node, dtype: torch.dtype, axes: Sequence[int], keepdim: bool) -> ir.Value:
    value = g.operand(x, dtype)
    if is_empty(x):  # where ONNX Runtime says 0
        return g.op("Add", reduced(g, "ReduceSum", value, axes, keepdim), g.constant(math.nan, dtype))
    return averaged(g, value, shape_of(x), axes, dtype, keepdim)


@lowers(aten.mean.default)
def mean_all(g: GraphBuilder, node: fx.Node, x: fx.Node, *, dtype: Any = None) -> ir.Value:
    return mean(g, node, x)


@lowers(aten.prod.default)
def prod_all(g: GraphBuilder, node: fx.Node, x: fx.Node, *, dtype: Any = None) -> ir.Value:
    return prod(g, node, x, None)


@lowers(aten.prod.dim_int)
def prod(
    g: GraphBuilder, node: fx.Node, x: fx.Node, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> ir.Value:
    kind = dtype_of(node)
    if kind == torch.float64:  # no such kernel in ONNX Runtime 1.19
        raise NotLowered("a product of float64 numbers")
    wide = _counting_dtype(kind)
    return g.cast(reduced(g, "ReduceProd", g.operand(x, wide), _axes(x, dim), keepdim), wide, kind)


def _extremum(
    g: GraphBuilder, value: ir.Value, x: fx.Node, op_type: str, axes: Sequence[int], keepdim: bool
) -> ir.Value:
    """ReduceMax or ReduceMin of ``value``, which has the type and the place of ``x``.

    ONNX Runtime's own ignore NaN, torch's return it. On a GPU they begin with the last finite number, and stay there
    where all are infinite.
    """
    dtype = dtype_of(x)
    wide = torch.int32 if dtype == torch.int16 else dtype
    value = g.cast(value, dtype, wide)
    result = reduced(g, op_type, value, axes, keepdim)
    if axes and dtype.is_floating_point and not is_on_cpu(x):
        last = g.constant(-math.inf if op_type == "ReduceMax" else math.inf, dtype)
        is_last = g.cast(g.op("Equal", value, last), torch.bool, torch.float32)
        all_last = g.cast(reduced(g, "ReduceMin", is_last, axes, keepdim), torch.float32, torch.bool)
        result = g.where(all_last, last, result, dtype)
    if axes and dtype.is_floating_point:
        # 0, or NaN if there is one: the sum of bounded numbers is finite
        bounded = g.op("Clip", value, g.constant(-1, dtype), g.constant(1, dtype))
        spoilt = g.op("Mul", reduced(g, "ReduceSum", bounded, axes, keepdim), g.constant(0, dtype))
        result = g.op("Add", result, spoilt)
    return g.cast(result, wide, dtype)


def extremum(g: GraphBuilder, x: fx.Node, op_type: str, dim: Any, keepdim: bool) -> ir.Value:
    _refuse_nothing(x, _axes(x, dim))
    return _extremum(g, g.value(x), x, op_type, _axes(x, dim), keepdim)


@lowers(aten.amax.default)
def amax(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: Any = (), keepdim: bool = False) -> ir.Value:
    return extremum(g, x, "ReduceMax", dim, keepdim)


@lowers(aten.amin.default)
def amin(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: Any = (), keepdim: bool = False) -> ir.Value:
    return extremum(g, x, "ReduceMin", dim, keepdim)


@lowers(aten.max.default)
def max_all(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    return extremum(g, x, "ReduceMax", None, False)


@lowers(aten.min.default)
def min_all(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    return extremum(g, x, "ReduceMin", None, False)


def _refuse_nothing(x: fx.Node, axes: Sequence[int]) -> None:
    """Leave the extremum of no numbers at all to torch, which raises an error about it."""
    if any(isinstance(size, int) and size == 0 for size in (x.meta["val"].shape[a] for a in axes)):
        raise NotLowered("the largest or smallest of no numbers")


def arg_extremum(g: GraphBuilder, x: fx.Node, op_type: str, axis: int | None, keepdim: bool) -> ir.Value:
    """ArgMax or ArgMin, the first of equal ones; NaN, which ONNX Runtime passes over, is the extremum."""
    dtype, rank = dtype_of(x), rank_of(x)
    if rank == 0:
        return g.constant(0, torch.int64)
    _refuse_nothing(x, range(rank) if axis is None else [axis])
    value, along = g.value(x), axis or 0
    if axis is None:
        value = g.op("Reshape", value, g.ints([-1]))
    if dtype == torch.int64:  # ONNX Runtime 1.19 has no ArgMax of them
        largest = int(op_type == "ArgMax")
        index = g.op("TopK", value, g.ints([1]), outputs=2, axis=along, largest=largest)[1]
    else:
        ordered = value if dtype.is_floating_point else g.cast(value, dtype, torch.int32)
        index = g.op(op_type, ordered, axis=along, keepdims=1)
        if dtype.is_floating_point:
            nans = g.cast(g.op("IsNaN", value), torch.bool, torch.float32)
            is_spoilt = g.cast(g.op("ReduceMax", nans, g.ints([along]), keepdims=1), torch.float32, torch.bool)
            index = g.where(is_spoilt, g.op("ArgMax", nans, axis=along, keepdims=1), index, torch.int64)
    if axis is None:
        return g.op("Reshape", index, g.ints([1] * rank if keepdim else []))
    return index if keepdim else g.op("Squeeze", index, g.ints([along]))


def _position(op_type: str) -> Any:
    def lower(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: Any = None, keepdim: bool = False) -> ir.Value:
        return arg_extremum(g, x, op_type, None if dim is None else dim % max(rank_of(x), 1), keepdim)

    return lower


lowers(aten.argmax.default)(_position("ArgMax"))
lowers(aten.argmin.default)(_position("ArgMin"))


def _value_and_position(position: str) -> Any:
    def lower(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, keepdim: bool = False) -> Any:
        if rank_of(x) == 0:
            return g.value(x), g.constant(0, torch.int64)
        axis = dim % rank_of(x)
        index = arg_extremum(g, x, position, axis, True)
        results = g.op("GatherElements", g.value(x), index, axis=axis), index
        return results if keepdim else tuple(g.op("Squeeze", r, g.ints([axis])) for r in results)

    return lower


lowers(aten.max.dim)(_value_and_position("ArgMax"))
lowers(aten.min.dim)(_value_and_position("ArgMin"))


def _truth(op_type: str) -> Any:
    """any is the maximum of truth values, all the minimum."""

    def lower(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: Any = None, keepdim: bool = False) -> ir.Value:
        value = g.operand(x, torch.bool)
        if is_empty(x):  # not a case that the reductions know
            count = reduced(g, "ReduceSum", g.cast(value, torch.bool, torch.int32), _axes(x, dim), keepdim)
            result = g.op("Equal", count, g.constant(int(op_type == "ReduceMax"), torch.int32))
        else:
            result = reduced(g, op_type, value, _axes(x, dim), keepdim)
        return g.cast(result, torch.bool, dtype_of(node))

    return lower


lowers(aten.any.default, aten.any.dim, aten.any.dims)(_truth("ReduceMax"))
lowers(aten.all.default, aten.all.dim, aten.all.dims)(_truth("ReduceMin"))


@lowers(aten.logsumexp.default)
def logsumexp(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: Any, keepdim: bool = False) -> ir.Value:
    """Written out, as ReduceLogSumExp takes eight times as long."""
    dtype, axes = dtype_of(node), _axes(x, dim)
    value = g.operand(x, dtype)
    if not axes:
        return value
    largest = reduced(g, "ReduceMax", value, axes, True)
    # an infinite one would become NaN in the difference
    limit = torch.finfo(dtype).max
    largest = g.op("Clip", largest, g.constant(-limit, dtype), g.constant(limit, dtype))
    total = reduced(g, "ReduceSum", exponential(g, g.op("Sub", value, largest), dtype), axes, True)
    result = g.op("Add", g.op("Log", total), largest)
    return result if keepdim else g.op("Squeeze", result, g.ints(axes))


@lowers(aten.linalg_vector_norm.default)
def vector_norm(
    g: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    order: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> ir.Value:
    kind, axes = dtype_of(node), _axes(x, dim)
    value = g.operand(x, kind)
    if not isinstance(order, (int, float)):
        raise NotLowered("a norm whose order changes")
    if order != 0 and all(shape_of(x)[a] == 1 for a in axes):  # a square may not fit
        size = g.op("Abs", value)
        return size if keepdim or not axes else g.op("Squeeze", size, g.ints(axes))
    if not axes or order == 1:
        return summed(g, g.op("Abs", value), shape_of(x), axes, kind, keepdim)
    if order == 2:
        # in two operators, as ReduceL2 takes three times as long
        return square_root(g, summed(g, g.op("Mul", value, value), shape_of(x), axes, kind, keepdim), kind)
    size = g.op("Abs", value)
    if abs(order) == math.inf:
        return _extremum(g, size, node, "ReduceMax" if order > 0 else "ReduceMin", axes, keepdim)
    if order == 0:
        nonzero = g.op("Not", g.op("Equal", value, g.constant(0, kind)))
        return reduced(g, "ReduceSum", g.cast(nonzero, torch.bool, kind), axes, keepdim)
    powers = summed(g, g.op("Pow", size, g.constant(order, kind)), shape_of(x), axes, kind, keepdim)
    return g.op("Pow", powers, g.constant(1 / order, kind))


def _variance(g: GraphBuilder, x: fx.Node, dim: Any, correction: Any, keepdim: bool) -> tuple[ir.Value, ir.Value]:
    """Variance and mean in two passes, as the numbers of torch."""
    dtype, axes = dtype_of(x), _axes(x, dim)
    value = g.value(x)
    correction = 1 if correction is None else correction
    mean = _mean(g, x, dtype, axes, keepdim=True)
    centred = g.op("Sub", value, mean)
    squares = summed(g, g.op("Mul", centred, centred), shape_of(x), axes, dtype, keepdim)
    sizes = [shape_of(x)[a] for a in axes]
    if all(isinstance(n, int) for n in sizes) and not isinstance(correction, fx.Node):
        count = math.prod(sizes) - correction
        # without a degree of freedom the quotient is 0 / 0
        variance = g.op("Mul", squares, g.constant(1 / count if count > 0 else math.inf, dtype))
    else:
        numel = reduced(g, "ReduceProd", g.op("Gather", g.op("Shape", value), g.ints(axes), axis=0), [0])
        count = g.op("Sub", g.cast(numel, torch.int64, dtype), g.operand(correction, dtype))
        variance = g.op("Div", squares, g.op("Max", count, g.constant(0, dtype)))
    if not keepdim and axes:
        mean = g.op("Squeeze", mean, g.ints(axes))
    return variance, mean


@lowers(aten.var.correction)
def var(
    g: GraphBuilder, node: fx.Node, x: fx.Node, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> ir.Value:
    return _variance(g, x, dim, correction, keepdim)[0]


@lowers(aten.var_mean.correction)
def var_mean(
    g: GraphBuilder, node: fx.Node, x: fx.Node, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    """The variance, and the mean, which is NaN in torch when an element is infinite."""
    variance, mean = _variance(g, x, dim, correction, keepdim)
    return variance, g.op("Add", mean, g.op("Sub", mean, mean))
