"""Sorted order, ranks and positions in sorted sequences."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.bounds import positions
from lightning_ort.compiler.lowering.builder import Dim, GraphBuilder, dtype_of, rank_of, shape_of
from lightning_ort.compiler.lowering.registry import NotLowered, lowers
from lightning_ort.compiler.lowering.shapes import is_empty

aten = torch.ops.aten


def _sorted(g: GraphBuilder, x: fx.Node, count: ir.Value, axis: int, largest: bool) -> tuple[ir.Value, ir.Value]:
    """The first ``count`` values and their positions; of equal ones the first comes first."""
    dtype, value = dtype_of(x), g.value(x)
    if is_empty(x):  # ONNX Runtime 1.19 divides by the number of rows
        raise NotLowered("sorting an empty tensor")
    if dtype.is_floating_point:  # torch takes NaN for the greatest, above infinity
        below = g.op("Min", value, g.constant(torch.finfo(dtype).max, dtype))
        keys = g.where(g.op("IsNaN", value), g.constant(math.inf, dtype), below, dtype)
        _, index = g.op("TopK", keys, count, outputs=2, axis=axis, largest=int(largest))
        return g.op("GatherElements", value, index, axis=axis), index
    wide = dtype if dtype in (torch.int32, torch.int64) else torch.int32
    top, index = g.op("TopK", g.cast(value, dtype, wide), count, outputs=2, axis=axis, largest=int(largest))
    return g.cast(top, wide, dtype), index


@lowers(aten.topk.default)
def topk(
    g: GraphBuilder, node: fx.Node, x: fx.Node, k: Dim, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    if rank_of(x) == 0:
        return g.value(x), g.constant(0, torch.int64)
    return _sorted(g, x, g.dims([k]), dim % rank_of(x), largest)


@lowers(aten.sort.default)
def sort(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int = -1, descending: bool = False) -> Any:
    if rank_of(x) == 0:
        return g.value(x), g.constant(0, torch.int64)
    axis = dim % rank_of(x)
    size = shape_of(x)[axis]
    count = g.ints([size]) if isinstance(size, int) else g.op("Shape", g.value(x), start=axis, end=axis + 1)
    return _sorted(g, x, count, axis, descending)


@lowers(aten.sort.stable)
def sort_stable(
    g: GraphBuilder, node: fx.Node, x: fx.Node, *, stable: Any = None, dim: int = -1, descending: bool = False
) -> Any:
    return sort(g, node, x, dim, descending)


@lowers(aten.kthvalue.default)
def kthvalue(g: GraphBuilder, node: fx.Node, x: fx.Node, k: Dim, dim: int = -1, keepdim: bool = False) -> Any:
    if rank_of(x) == 0:
        return g.value(x), g.constant(0, torch.int64)
    axis, rank = dim % rank_of(x), g.op("Sub", g.dims([k]), g.ints([1]))
    return _picked(g, _sorted(g, x, g.dims([k]), axis, False), _spread_rank(g, x, rank, axis), axis, keepdim)


def _median(*, ignores_nan: bool) -> Any:
    """The lower one of two medians; NaN if there is one, or the median of all others."""

    def lower(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, keepdim: bool = False) -> Any:
        if rank_of(x) == 0:
            return g.value(x), g.constant(0, torch.int64)
        axis = dim % rank_of(x)
        size = g.op("Shape", g.value(x), start=axis, end=axis + 1)
        half = _spread_rank(g, x, g.op("Div", g.op("Sub", size, g.ints([1])), g.ints([2])), axis)
        if dtype_of(x).is_floating_point:
            nans = g.cast(g.op("IsNaN", g.value(x)), torch.bool, torch.int64)
            numbers = g.op("Sub", size, g.op("ReduceSum", nans, g.ints([axis]), keepdims=1))
            if ignores_nan:
                half = g.op("Div", g.op("Sub", g.op("Max", numbers, g.ints([1])), g.ints([1])), g.ints([2]))
            else:  # the first NaN comes after all numbers
                half = g.op("Where", g.op("Less", numbers, size), numbers, half)
        return _picked(g, _sorted(g, x, size, axis, False), half, axis, keepdim)

    return lower


lowers(aten.median.dim)(_median(ignores_nan=False))
lowers(aten.nanmedian.dim)(_median(ignores_nan=True))


def _spread_rank(g: GraphBuilder, x: fx.Node, rank: ir.Value, axis: int) -> ir.Value:
    """One rank for each row along ``axis``."""
    shape = g.op("Shape", g.value(x))
    rows = g.op("ScatterElements", shape, g.ints([axis]), g.ints([1]), axis=0)
    return g.op("Expand", rank, rows)


def _picked(
    g: GraphBuilder, ordered: tuple[ir.Value, ir.Value], rank: ir.Value, axis: int, keepdim: bool
) -> tuple[ir.Value, ...]:
    """The value and the position of that rank in each row."""
    results = tuple(g.op("GatherElements", v, rank, axis=axis) for v in ordered)
    return results if keepdim else tuple(g.op("Squeeze", r, g.ints([axis])) for r in results)


@lowers(aten.bucketize.Tensor)
def bucketize(
    g: GraphBuilder, node: fx.Node, x: fx.Node, boundaries: fx.Node, *, out_int32: bool = False, right: bool = False
) -> ir.Value:
    return _position(g, node, g.value(boundaries), dtype_of(boundaries), x, right)


@lowers(aten.searchsorted.Tensor)
def searchsorted(
    g: GraphBuilder,
    node: fx.Node,
    boundaries: fx.Node,
    x: fx.Node,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: fx.Node | None = None,
) -> ir.Value:
    value = g.value(boundaries)
    if sorter is not None:
        places = positions(g, sorter, shape_of(boundaries)[-1])
        value = g.op("GatherElements", value, places, axis=rank_of(boundaries) - 1)
    if rank_of(boundaries) > 1:
        value = g.op("Unsqueeze", value, g.ints([rank_of(boundaries) - 1]))
    return _position(g, node, value, dtype_of(boundaries), x, right or side == "right")


def _position(
    g: GraphBuilder, node: fx.Node, boundaries: ir.Value, dtype: torch.dtype, x: fx.Node, right: bool
) -> ir.Value:
    """How many boundaries lie before ``x``: those that are not above it, NaN being above all."""
    common = torch.promote_types(dtype, dtype_of(x))
    common = common if common.is_floating_point or common == torch.int64 else torch.int32
    value = g.op("Unsqueeze", g.operand(x, common), g.ints([rank_of(x)]))
    after = g.op("Greater" if right else "GreaterOrEqual", g.cast(boundaries, dtype, common), value)
    before = g.cast(g.op("Not", after), torch.bool, torch.int32)
    count = g.op("ReduceSum", before, g.ints([rank_of(x)]), keepdims=0)
    return g.cast(count, torch.int32, dtype_of(node))


@lowers(aten.cumsum.default)
def cumsum(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, *, dtype: Any = None) -> ir.Value:
    kind = dtype_of(node)
    wide = kind if kind.is_floating_point or kind == torch.int32 else torch.int64
    value = g.operand(x, wide)
    if rank_of(x):
        value = g.op("CumSum", value, g.constant(dim % rank_of(x), torch.int64))
    return g.cast(value, wide, kind)
