"""Views: the same elements under another shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lightning_ort.compiler.lowering.builder import Dim, GraphBuilder, dtype_of, rank_of, shape_of
from lightning_ort.compiler.lowering.registry import NotLowered, lowers
from lightning_ort.compiler.lowering.sums import summed
from lightning_ort.compiler.symbolic_shapes import entries_in_order, hint
from lightning_ort.runtime.tensors import NUMPY

aten = torch.ops.aten


def positive(dim: int, rank: int) -> int:
    """``dim`` counted from the front; a 0-d tensor counts as 1-d, as in torch."""
    return dim % max(rank, 1)


@lowers(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten._reshape_alias.default)
def view(g: GraphBuilder, node: fx.Node, x: fx.Node, size: Sequence[Any], *_: Any) -> ir.Value:
    axes = _dropped_after_sum(g, node, x)
    if axes is not None:
        return summed(g, g.value(x.args[0]), shape_of(x.args[0]), axes, dtype_of(x))
    return reshaped(g, node, g.value(x), size)


def _dropped_after_sum(g: GraphBuilder, node: fx.Node, x: fx.Node) -> list[int] | None:
    """The dimensions that ``x`` sums over and ``node`` drops: autograd writes the gradient of a bias in these steps."""
    if x.target is not aten.sum.dim_IntList or len(x.args) < 3 or not x.args[2] or not g.knows(x.args[0]):
        return None
    source, dims = x.args[0], x.args[1]
    if not dims or dtype_of(source) != dtype_of(x) or dtype_of(x) not in (torch.float32, torch.float64):
        return None
    axes = sorted({d % rank_of(x) for d in dims})
    rest = [size for d, size in enumerate(shape_of(x)) if d not in axes]
    return axes if same_shape(rest, shape_of(node)) else None


def reshaped(g: GraphBuilder, node: fx.Node, value: ir.Value, size: Sequence[Any]) -> ir.Value:
    """``value`` in the shape of ``node``; ``size`` is what was asked for and may contain -1 and fx nodes."""
    result = shape_of(node)
    dims: list[Dim] = [r if isinstance(r, int) else s for r, s in zip(result, size, strict=True)]
    if -1 not in dims:
        return g.reshape(value, dims)
    if any(d == 0 for d in dims if isinstance(d, int)):
        raise NotLowered("a view of an empty tensor with an inferred size")
    return g.op("Reshape", value, g.dims(dims))


def permutation(node: fx.Node) -> list[int] | None:
    """The order in which ``node`` puts the dimensions of its first argument; ``None`` if it does something else."""
    if node.target is aten.permute.default:
        return [d % rank_of(node) for d in node.args[1]]
    if node.target is aten.t.default:
        return list(range(rank_of(node)))[::-1]
    if node.target is not aten.transpose.int:
        return None
    order = list(range(rank_of(node)))
    a, b = (positive(d, len(order)) for d in node.args[1:3])
    if order:
        order[a], order[b] = b, a
    return order


def unpermuted(g: GraphBuilder, node: fx.Node) -> tuple[fx.Node, list[int]]:
    """The tensor behind a chain of permutations, and the order that all of them together make."""
    order = list(range(rank_of(node)))
    while (step := permutation(node)) is not None and g.knows(node.args[0]):
        order, node = [step[d] for d in order], node.args[0]
    return node, order


@lowers(aten.permute.default, aten.transpose.int, aten.t.default)
def permute(g: GraphBuilder, node: fx.Node, x: fx.Node, *_: Any) -> ir.Value:
    source, order = unpermuted(g, node)
    if order == list(range(len(order))):
        return g.value(source)
    return g.op("Transpose", g.value(source), perm=order)


@lowers(aten.expand.default)
def expand(g: GraphBuilder, node: fx.Node, x: fx.Node, size: Sequence[Any], *, implicit: bool = False) -> ir.Value:
    if same_shape(shape_of(x), shape_of(node)):
        if x in g.compact:
            g.compact[node] = g.compact[x]
        return g.value(x)
    if is_empty(node):  # ONNX Runtime drops an Expand to a size of 0 as one that does nothing
        dims = [r if isinstance(r, int) else s for r, s in zip(shape_of(node), size, strict=True)]
        return g.op("ConstantOfShape", g.dims(dims), value=ir.tensor(np.zeros(1, NUMPY[dtype_of(node)])))
    g.compact[node] = g.compact[x] if x in g.compact else g.value(x)
    lead = rank_of(node) - rank_of(x)
    kept = [1] * lead + list(shape_of(x))
    # A size of 1 leaves the dimension as it is, so that unchanged symbolic sizes need not be computed.
    dims = [
        1 if same_shape([k], [r]) else r if isinstance(r, int) else s
        for k, r, s in zip(kept, shape_of(node), size, strict=True)
    ]
    return g.op("Expand", g.value(x), g.dims(dims))


@lowers(aten.copy.default)
def copy(g: GraphBuilder, node: fx.Node, x: fx.Node, src: Any, non_blocking: bool = False) -> ir.Value:
    """``src``, which may be a number, in the shape and type of ``x``, whose numbers do not matter."""
    value = g.operand(src, dtype_of(node))
    is_tensor = isinstance(src, fx.Node) and isinstance(src.meta["val"], torch.Tensor)
    if is_tensor and same_shape(shape_of(src), shape_of(node)):
        return value
    return g.op("Expand", value, g.shape(x))


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal, symbolic sizes compared by their expression."""
    return size_key(a) == size_key(b)


def is_empty(x: fx.Node) -> bool:
    """Whether ``x`` is known to have no elements."""
    return any(isinstance(d, int) and d == 0 for d in shape_of(x))


def size_key(shape: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(d if isinstance(d, int) else d.node.expr for d in shape)


@lowers(aten.unsqueeze.default)
def unsqueeze(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int) -> ir.Value:
    return g.op("Unsqueeze", g.value(x), g.ints([dim % rank_of(node)]))


@lowers(aten.squeeze.default)
def squeeze(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    return _squeeze(g, node, x, range(rank_of(x)))


@lowers(aten.squeeze.dim)
def squeeze_dim(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int) -> ir.Value:
    return _squeeze(g, node, x, [dim])


@lowers(aten.squeeze.dims)
def squeeze_dims(g: GraphBuilder, node: fx.Node, x: fx.Node, dims: Sequence[int]) -> ir.Value:
    return _squeeze(g, node, x, dims)


def _squeeze(g: GraphBuilder, node: fx.Node, x: fx.Node, dims: Sequence[int]) -> ir.Value:
    """Without the dimensions of size 1, also where a size is computed of others and was found to be 1."""
    shape = shape_of(x)
    ones = [d % len(shape) for d in dims if len(shape) and hint(shape[d]) == 1]
    if len(ones) != len(shape) - rank_of(node):
        raise NotLowered("squeezing dimensions of which torch does not say whether their size is 1")
    return g.op("Squeeze", g.value(x), g.ints(ones)) if ones else g.value(x)


@lowers(aten.repeat.default)
def repeat(g: GraphBuilder, node: fx.Node, x: fx.Node, repeats: Sequence[Dim]) -> ir.Value:
    value, lead = g.value(x), len(repeats) - rank_of(x)
    if lead:
        value = g.op("Unsqueeze", value, g.ints(list(range(lead))))
    if all(isinstance(r, int) and r == 1 for r in repeats):
        return value
    return g.op("Tile", value, g.dims(repeats))


@lowers(aten.tril.default)
def tril(g: GraphBuilder, node: fx.Node, x: fx.Node, diagonal: Dim = 0) -> ir.Value:
    return _trilu(g, x, diagonal, upper=0)


@lowers(aten.triu.default)
def triu(g: GraphBuilder, node: fx.Node, x: fx.Node, diagonal: Dim = 0) -> ir.Value:
    return _trilu(g, x, diagonal, upper=1)


def _trilu(g: GraphBuilder, x: fx.Node, diagonal: Dim, upper: int) -> ir.Value:
    dtype = dtype_of(x)
    wide = torch.int64 if dtype in (torch.int32, torch.int16, torch.int8, torch.uint8) else dtype
    k = g.operand(diagonal, torch.int64)
    return g.cast(g.op("Trilu", g.cast(g.value(x), dtype, wide), k, upper=upper), wide, dtype)


@lowers(aten.diagonal.default)
def diagonal(g: GraphBuilder, node: fx.Node, x: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ir.Value:
    """A strided slice of the two dimensions taken as one."""
    flat, rows, columns, lead = _flat_planes(g, x, dim1, dim2)
    start = offset if offset >= 0 else -offset * columns
    length = max(min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns), 0)
    axis, step = g.ints([lead]), columns + 1
    return g.op("Slice", flat, g.ints([start]), g.ints([start + length * step]), axis, g.ints([step]))


@lowers(aten.diagonal_scatter.default)
def diagonal_scatter(
    g: GraphBuilder, node: fx.Node, x: fx.Node, src: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> ir.Value:
    flat, rows, columns, lead = _flat_planes(g, x, dim1, dim2)
    mask = np.eye(rows, columns, offset, dtype=bool).reshape(-1)
    if not mask.any():
        return g.value(x)
    # Each element of the plane reads its entry of the diagonal; a select between the two has no scatter to order.
    source = g.op("Gather", g.value(src), g.ints(np.maximum(np.cumsum(mask) - 1, 0).tolist()), axis=lead)
    dtype = dtype_of(node)
    wide = torch.int32 if dtype in (torch.bool, torch.int8, torch.int16) else dtype
    source, flat = g.cast(source, dtype_of(src), wide), g.cast(flat, dtype, wide)
    chosen = g.cast(g.where(g.constant(mask, torch.bool), source, flat, wide), wide, dtype)
    rank = rank_of(x)
    plane = g.ints([rows, columns])
    head = g.op("Shape", flat, start=0, end=lead)
    moved = g.op("Reshape", chosen, g.op("Concat", head, plane, axis=0))
    a, b = dim1 % rank, dim2 % rank
    order = [d for d in range(rank) if d not in (a, b)] + [a, b]
    return g.op("Transpose", moved, perm=[int(i) for i in np.argsort(order)])


def _flat_planes(g: GraphBuilder, x: fx.Node, dim1: int, dim2: int) -> tuple[ir.Value, int, int, int]:
    """``x`` with ``dim1`` and ``dim2`` moved last and merged; their sizes; the number of dimensions before them."""
    rank, shape = rank_of(x), shape_of(x)
    a, b = dim1 % rank, dim2 % rank
    rows, columns = shape[a], shape[b]
    if not (isinstance(rows, int) and isinstance(columns, int)):
        raise NotLowered("a diagonal of dimensions whose sizes change")
    perm = [d for d in range(rank) if d not in (a, b)] + [a, b]
    value = g.op("Transpose", g.value(x), perm=perm)
    lead = g.op("Shape", value, start=0, end=rank - 2)
    return g.op("Reshape", value, g.op("Concat", lead, g.ints([rows * columns]), axis=0)), rows, columns, rank - 2


def _places(val: torch.Tensor, size: Sequence[Any], stride: Sequence[Any], offset: Any) -> np.ndarray:
    """Where in the flat elements of ``val`` those of a strided view of its memory lie."""
    if not all(isinstance(n, int) for n in [*val.shape, *size, *stride, offset]):
        raise NotLowered("as_strided with sizes that change")
    if not val.is_contiguous() or val.storage_offset() != 0:
        raise NotLowered("as_strided of a tensor that is not contiguous")
    places = np.full(tuple(size), offset, np.int64)
    for axis, (n, s) in enumerate(zip(size, stride, strict=True)):
        places += (np.arange(n) * s).reshape([-1 if d == axis else 1 for d in range(len(size))])
    return places


def _is_all_in_order(x: torch.Tensor, size: Sequence[Any], stride: Sequence[Any], offset: Any) -> bool:
    """Whether a strided view of the memory of ``x`` has its elements, all and in their order, in another shape.

    torch gives the average of each image other strides along its sizes of 1, to say that channels would rather be last,
    and its gradient goes by way of a flat piece of memory.
    """
    if not statically_known_true(x.storage_offset() == _values([offset or 0])[0]):
        return False
    entries = entries_in_order(_values(size), _values(stride))
    if entries is None or entries_in_order(x.shape, x.stride()) is None:
        return False
    return statically_known_true(entries == x.numel())


def _values(numbers: Sequence[Any]) -> list[Any]:
    return [n.meta["val"] if isinstance(n, fx.Node) else n for n in numbers]


@lowers(aten.as_strided.default)
def as_strided(
    g: GraphBuilder, node: fx.Node, x: fx.Node, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None
) -> ir.Value:
    if _is_all_in_order(x.meta["val"], size, stride, storage_offset):
        return reshaped(g, node, g.value(x), size)
    places = _places(x.meta["val"], size, stride, storage_offset or 0)
    return g.op("Gather", g.op("Reshape", g.value(x), g.ints([-1])), g.constant(places, torch.int64), axis=0)


@lowers(aten.as_strided_scatter.default)
def as_strided_scatter(
    g: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    src: fx.Node,
    size: Sequence[Any],
    stride: Sequence[Any],
    storage_offset: Any = None,
) -> ir.Value:
    if _is_all_in_order(x.meta["val"], size, stride, storage_offset):
        return g.op("Reshape", g.value(src), g.op("Shape", g.value(x)))
    places = _places(x.meta["val"], size, stride, storage_offset or 0).reshape(-1)
    flat, updates = (g.op("Reshape", g.value(v), g.ints([-1])) for v in (x, src))
    result = g.op("ScatterElements", flat, g.constant(places, torch.int64), updates, axis=0)
    return g.reshape(result, list(shape_of(node)))
