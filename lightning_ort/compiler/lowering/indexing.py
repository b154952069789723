"""Reading and writing elements at computed positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.bounds import positions, wrapping_positions
from lightning_ort.compiler.lowering.builder import Dim, GraphBuilder, dtype_of, rank_of, shape_of
from lightning_ort.compiler.lowering.registry import NotLowered, lowers
from lightning_ort.compiler.lowering.shapes import is_empty, positive, same_shape
from lightning_ort.runtime.tensors import NUMPY

aten = torch.ops.aten


def _as_vector(g: GraphBuilder, value: ir.Value, rank: int) -> ir.Value:
    return g.op("Reshape", value, g.ints([1])) if rank == 0 else value


def _size(x: fx.Node, dim: int) -> Any:
    return shape_of(x)[dim] if rank_of(x) else 1


@lowers(aten.gather.default)
def gather(
    g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, *, sparse_grad: bool = False
) -> ir.Value:
    data, places = (
        _as_vector(g, g.value(x), rank_of(x)),
        _as_vector(g, positions(g, index, _size(x, dim)), rank_of(index)),
    )
    if is_empty(index):
        return g.op("ConstantOfShape", g.shape(index), value=ir.tensor(np.zeros(1, NUMPY[dtype_of(x)])))
    result = g.op("GatherElements", data, places, axis=positive(dim, rank_of(x)))
    return result if rank_of(index) else g.op("Reshape", result, g.ints([]))


@lowers(aten.index_select.default)
def index_select(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node) -> ir.Value:
    data, places = (
        _as_vector(g, g.value(x), rank_of(x)),
        _as_vector(g, positions(g, index, _size(x, dim)), rank_of(index)),
    )
    result = g.op("Gather", data, places, axis=positive(dim, rank_of(x)))
    return result if rank_of(x) else g.op("Reshape", result, g.ints([]))


REDUCTIONS = {"sum": "add", "add": "add", "prod": "mul", "multiply": "mul", "amax": "max", "amin": "min"}


def scatter_elements(
    g: GraphBuilder,
    dtype: torch.dtype,
    data: ir.Value,
    index: ir.Value,
    updates: ir.Value,
    axis: int,
    reduction: str = "none",
) -> ir.Value:
    """ScatterElements in a type that ONNX Runtime reduces."""
    wide = dtype
    if reduction != "none":
        wide = {torch.float16: torch.float32, torch.bool: torch.int32}.get(dtype, dtype)
    data, updates = g.cast(data, dtype, wide), g.cast(updates, dtype, wide)
    result = g.op("ScatterElements", data, index, updates, axis=axis, reduction=reduction)
    if reduction in ("max", "min") and wide.is_floating_point:  # which pass over NaN
        nans, more = (g.cast(g.op("IsNaN", v), torch.bool, torch.float32) for v in (data, updates))
        spoilt = g.op("ScatterElements", nans, index, more, axis=axis, reduction="max")
        spoilt = g.cast(spoilt, torch.float32, torch.bool)
        result = g.where(spoilt, g.constant(math.nan, wide), result, wide)
    return g.cast(result, wide, dtype)


def scattered(
    g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, updates: ir.Value, reduction: str = "none"
) -> ir.Value:
    """``x`` with ``updates``, of the shape of ``index``, written along ``dim``."""
    if is_empty(index):  # of any rank
        return g.value(x)
    rank = rank_of(x)
    data = _as_vector(g, g.value(x), rank)
    places = _as_vector(g, positions(g, index, _size(x, dim)), rank_of(index))
    updates = _as_vector(g, updates, rank_of(index))
    result = scatter_elements(g, dtype_of(x), data, places, updates, positive(dim, rank), reduction)
    return result if rank else g.op("Reshape", result, g.ints([]))


def _source(g: GraphBuilder, src: fx.Node, index: fx.Node, dtype: torch.dtype) -> ir.Value:
    """The leading part of ``src`` that has the shape of ``index``: torch ignores the rest."""
    value = g.operand(src, dtype)
    if same_shape(shape_of(src), shape_of(index)) or rank_of(index) == 0 or is_empty(index):
        return value
    axes = list(range(rank_of(src)))
    return g.op("Slice", value, g.ints([0] * len(axes)), g.shape(index), g.ints(axes))


def _checked(reduce: str) -> str:
    if reduce not in REDUCTIONS:
        raise NotLowered(f"scatter with reduce={reduce!r}")
    return REDUCTIONS[reduce]


@lowers(aten.scatter.src)
def scatter_src(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, src: fx.Node) -> ir.Value:
    return scattered(g, node, x, dim, index, _source(g, src, index, dtype_of(x)))


@lowers(aten.scatter.reduce)
def scatter_reduced(
    g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, src: fx.Node, *, reduce: str
) -> ir.Value:
    return scattered(g, node, x, dim, index, _source(g, src, index, dtype_of(x)), _checked(reduce))


@lowers(aten.scatter_add.default)
def scatter_add(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, src: fx.Node) -> ir.Value:
    return scattered(g, node, x, dim, index, _source(g, src, index, dtype_of(x)), "add")


def _repeated(g: GraphBuilder, index: fx.Node, value: Any, dtype: torch.dtype) -> ir.Value:
    return g.op("Expand", g.operand(value, dtype), g.shape(index))


@lowers(aten.scatter.value)
def scatter_value(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, value: Any) -> ir.Value:
    return scattered(g, node, x, dim, index, _repeated(g, index, value, dtype_of(x)))


@lowers(aten.scatter.value_reduce)
def scatter_value_reduced(
    g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, value: Any, *, reduce: str
) -> ir.Value:
    return scattered(g, node, x, dim, index, _repeated(g, index, value, dtype_of(x)), _checked(reduce))


@lowers(aten.scatter_reduce.two)
def scatter_reduce(
    g: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    dim: int,
    index: fx.Node,
    src: fx.Node,
    reduce: str,
    *,
    include_self: bool = True,
) -> ir.Value:
    assert include_self, "decomposed"
    return scattered(g, node, x, dim, index, _source(g, src, index, dtype_of(x)), _checked(reduce))


def is_mask(index: fx.Node) -> bool:
    return dtype_of(index) in (torch.bool, torch.uint8)


def index_values(g: GraphBuilder, x: fx.Node, indices: Sequence[fx.Node | None]) -> tuple[list[int], list[ir.Value]]:
    """The indexed dimensions of ``x`` and their int64 indices."""
    found = {d: i for d, i in enumerate(indices) if i is not None}
    if any(is_mask(i) for i in found.values()):
        raise NotLowered("indexing by a boolean mask: the size of the result depends on the data")
    return list(found), wrapping_positions(g, list(found.values()), [shape_of(x)[d] for d in found])


def broadcast_rank(indices: Sequence[fx.Node | None]) -> int:
    """Number of dimensions of the indices broadcast together."""
    return max(rank_of(i) for i in indices if i is not None)


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(g: GraphBuilder, node: fx.Node, x: fx.Node, indices: Sequence[fx.Node | None]) -> ir.Value:
    dims, values = index_values(g, x, indices)
    if not dims:
        return g.value(x)
    if len(dims) == 1:
        return g.op("Gather", g.value(x), values[0], axis=dims[0])
    rank, index_rank = rank_of(x), broadcast_rank(indices)
    others = [d for d in range(rank) if d not in dims]
    data = g.value(x)
    if dims != list(range(len(dims))):
        data = g.op("Transpose", data, perm=dims + others)
    result = g.op("GatherND", data, coordinates(g, indices, values))
    first = result_position(dims)
    if first == 0:
        return result
    # The dimensions of the indices stand where the indexed ones stood.
    perm = [index_rank + i for i in range(first)] + list(range(index_rank))
    perm += list(range(index_rank + first, index_rank + len(others)))
    return g.op("Transpose", result, perm=perm)


def result_position(dims: Sequence[int]) -> int:
    """Where the dimensions of the indices go: in front, unless the indexed dimensions are neighbours."""
    return dims[0] if list(dims) == list(range(dims[0], dims[-1] + 1)) else 0


def coordinates(g: GraphBuilder, indices: Sequence[fx.Node | None], values: Sequence[ir.Value]) -> ir.Value:
    """The values of the indices, broadcast together, as rows of coordinates in the last dimension."""
    nodes = [i for i in indices if i is not None]
    if not all(same_shape(shape_of(nodes[0]), shape_of(n)) for n in nodes):
        common = values[0]
        for other in values[1:]:  # the sum has the common shape
            common = g.op("Add", common, other)
        shape = g.op("Shape", common)
        values = [g.op("Expand", v, shape) for v in values]
    rank = broadcast_rank(indices)
    return g.op("Concat", *(g.op("Unsqueeze", v, g.ints([rank])) for v in values), axis=rank)


@lowers(aten.put.default)
def put(g: GraphBuilder, node: fx.Node, x: fx.Node, index: fx.Node, src: fx.Node, accumulate: bool = False) -> ir.Value:
    """Writing to the tensor taken as a vector."""
    (places,) = wrapping_positions(g, [index], [x.meta["val"].numel()])
    data, places, updates = (g.op("Reshape", v, g.ints([-1])) for v in (g.value(x), places, g.value(src)))
    result = scatter_elements(g, dtype_of(x), data, places, updates, 0, "add" if accumulate else "none")
    return g.op("Reshape", result, g.shape(x))


@lowers(aten.embedding.default)
def embedding(
    g: GraphBuilder,
    node: fx.Node,
    weight: fx.Node,
    indices: fx.Node,
    padding_idx: Dim = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> ir.Value:
    return g.op("Gather", g.value(weight), positions(g, indices, shape_of(weight)[0]), axis=0)


@lowers(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    g: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    indices: fx.Node,
    num_weights: int,
    padding_idx: Dim,
    scale_grad_by_freq: bool,
) -> ir.Value:
    dtype, width = dtype_of(grad), shape_of(grad)[-1]
    rows = g.op("Reshape", g.value(grad), g.ints([-1, int(width)]))
    flat = g.op("Reshape", positions(g, indices, num_weights), g.ints([-1, 1]))
    if isinstance(padding_idx, fx.Node) or padding_idx >= 0:
        kept = g.op("Not", g.op("Equal", flat, g.operand(padding_idx, torch.int64)))
        rows = g.where(kept, rows, g.constant(0, dtype), dtype)
    if scale_grad_by_freq:
        ones = g.op("Expand", g.constant([[1]], dtype), g.op("Shape", flat))
        zeros = g.op("Expand", g.constant([[0]], dtype), g.dims([num_weights, 1]))
        counts = g.op("ScatterElements", zeros, flat, ones, axis=0, reduction="add")
        rows = g.op("Div", rows, g.op("Gather", counts, g.op("Reshape", flat, g.ints([-1])), axis=0))
    zeros = g.op("Expand", g.constant([[0]], dtype), g.dims([num_weights, int(width)]))
    if g.one_thread:  # threads would add to the same row at the same time; and yet it is up to 20 times faster
        return g.op("ScatterND", zeros, flat, rows, reduction="add")
    spread = g.op("Expand", flat, g.op("Shape", rows))
    return g.op("ScatterElements", zeros, spread, rows, axis=0, reduction="add")
