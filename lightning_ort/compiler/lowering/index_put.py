"""Assignment to, and accumulation at, positions given by index tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, rank_of, shape_of
from lightning_ort.compiler.lowering.indexing import (
    broadcast_rank,
    index_values,
    is_mask,
    result_position,
    scatter_elements,
)
from lightning_ort.compiler.lowering.registry import NotLowered, lowers

aten = torch.ops.aten


@lowers(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    g: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    indices: Sequence[fx.Node | None],
    values: fx.Node,
    accumulate: bool = False,
) -> ir.Value:
    """ScatterElements along the indexed dimensions, which are taken as one.

    ScatterND has the matching form, but its reduction="add" races on the CPU provider of ONNX Runtime.
    """
    if len(indices) == 1 and indices[0] is not None and is_mask(indices[0]):
        return _masked(g, x, indices[0], values, accumulate)
    dims, positions = index_values(g, x, indices)
    rank, count = rank_of(x), len(dims)
    index_rank = broadcast_rank(indices)
    data, updates = g.value(x), _expanded(g, x, indices, dims, positions, values)
    neighbours = dims == list(range(dims[0], dims[0] + count))
    first = result_position(dims)
    order = list(range(rank))
    if not neighbours:
        order = dims + [d for d in range(rank) if d not in dims]
        data = g.op("Transpose", data, perm=order)
    shape = g.op("Shape", data)
    before, after = (
        g.op("Slice", shape, g.ints([0]), g.ints([first])),
        g.op("Slice", shape, g.ints([first + count]), g.ints([rank])),
    )
    middle = g.ints([-1])
    flat = data if count == 1 else g.op("Reshape", data, g.op("Concat", before, middle, after, axis=0))
    if index_rank != 1:
        updates = g.op("Reshape", updates, g.op("Concat", before, middle, after, axis=0))
    linear = g.op("Reshape", _linear(g, x, dims, positions), g.ints([-1] + [1] * (rank - count - first)))
    spread = g.op("Expand", linear, g.op("Shape", updates))
    result = scatter_elements(g, dtype_of(x), flat, spread, updates, first, "add" if accumulate else "none")
    if count > 1:
        result = g.op("Reshape", result, shape)
    if not neighbours:
        result = g.op("Transpose", result, perm=[order.index(d) for d in range(rank)])
    return result


def _linear(g: GraphBuilder, x: fx.Node, dims: Sequence[int], positions: Sequence[ir.Value]) -> ir.Value:
    """The position in the indexed dimensions taken as one; negative indices count from the end of their own.

    Each is looked up among the numbers of its dimension, which refuses those that are out of range.
    """
    if len(dims) == 1:
        return positions[0]
    counted = [g.op("Gather", _numbers(g, x, d), p, axis=0) for d, p in zip(dims, positions, strict=True)]
    result = counted[0]
    for d, position in zip(dims[1:], counted[1:], strict=True):
        result = g.op("Add", g.op("Mul", result, _size(g, x, d)), position)
    return result


def _numbers(g: GraphBuilder, x: fx.Node, dim: int) -> ir.Value:
    size = shape_of(x)[dim]
    if isinstance(size, int):
        return g.ints(range(size))
    zero, one = g.constant(0, torch.int64), g.constant(1, torch.int64)
    return g.op("Range", zero, g.op("Squeeze", _size(g, x, dim)), one)


def _size(g: GraphBuilder, x: fx.Node, dim: int) -> ir.Value:
    size = shape_of(x)[dim]
    return g.ints([size]) if isinstance(size, int) else g.op("Shape", g.value(x), start=dim, end=dim + 1)


def _expanded(
    g: GraphBuilder,
    x: fx.Node,
    indices: Sequence[fx.Node | None],
    dims: Sequence[int],
    positions: Sequence[ir.Value],
    values: fx.Node,
) -> ir.Value:
    """``values`` in the shape that ``x[indices]`` has."""
    rank, first = rank_of(x), result_position(dims)
    others = [d for d in range(rank) if d not in dims]
    common = positions[0]
    for other in positions[1:]:  # the sum has the common shape
        common = g.op("Add", common, other)
    pieces = (
        [_size(g, x, d) for d in others[:first]] + [g.op("Shape", common)] + [_size(g, x, d) for d in others[first:]]
    )
    return g.op("Expand", g.operand(values, dtype_of(x)), g.op("Concat", *pieces, axis=0))


def _masked(g: GraphBuilder, x: fx.Node, mask: fx.Node, values: fx.Node, accumulate: bool) -> ir.Value:
    if rank_of(values) > 0 and list(shape_of(values)) != [1]:
        raise NotLowered("assigning a tensor at a boolean mask: how much of it is used depends on the data")
    # the types that ONNX Runtime chooses between and adds are few
    is_narrow = dtype_of(x) in (torch.bool, torch.uint8, torch.int8, torch.int16)
    wide = torch.int32 if is_narrow else dtype_of(x)
    condition, data = g.operand(mask, torch.bool), g.operand(x, wide)
    missing = rank_of(x) - rank_of(mask)
    if missing:
        condition = g.op("Unsqueeze", condition, g.ints(list(range(-missing, 0))))
    value: Any = g.operand(values, wide)
    if accumulate:
        value = g.op("Add", data, value)
    return g.cast(g.where(condition, value, data, wide), wide, dtype_of(x))
