"""Parts of tensors and tensors put together from parts."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import Dim, GraphBuilder, dtype_of, rank_of, shape_of
from lightning_ort.compiler.lowering.registry import NotLowered, lowers
from lightning_ort.compiler.lowering.shapes import is_empty, positive

aten = torch.ops.aten

END = sys.maxsize


@lowers(operator.getitem)
def getitem(g: GraphBuilder, node: fx.Node, results: fx.Node, index: int) -> ir.Value:
    return g.value(results, index)


def sliced(g: GraphBuilder, value: ir.Value, axis: int, start: Dim, end: Dim, step: int = 1) -> ir.Value:
    """``value[start:end:step]`` along ``axis``; bounds mean what they mean in Python."""
    return g.op("Slice", value, g.dims([start]), g.dims([end]), g.ints([axis]), g.ints([step]))


@lowers(aten.slice.Tensor)
def slice_(
    g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> ir.Value:
    start, end = 0 if start is None else start, END if end is None else end
    if not isinstance(step, int):
        raise NotLowered("a slice whose step changes")
    dim = positive(dim, rank_of(x))
    if step == 1 and start == 0 and _covers(end, shape_of(x)[dim]):
        return g.value(x)
    return sliced(g, g.value(x), dim, start, end, step)


def _covers(end: Any, size: Any) -> bool:
    return isinstance(end, int) and (end == END or (isinstance(size, int) and end >= size))


@lowers(aten.select.int)
def select(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: Any) -> ir.Value:
    dim = positive(dim, rank_of(x))
    return g.op("Gather", g.value(x), g.operand(index, torch.int64), axis=dim)


@lowers(aten.slice_scatter.default)
def slice_scatter(
    g: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    src: fx.Node,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> ir.Value:
    if is_empty(src):
        return g.value(x)
    start, end = 0 if start is None else start, END if end is None else end
    dim = positive(dim, rank_of(x))
    size = shape_of(x)[dim]
    value, part = g.value(x), g.operand(src, dtype_of(node))
    if step == 1:
        pieces = []
        if start != 0:
            pieces.append(sliced(g, value, dim, 0, start))
        pieces.append(part)
        if not _covers(end, size):
            pieces.append(sliced(g, value, dim, end, END))
        # start > end selects nothing, and the two outer pieces would overlap
        if isinstance(start, int) and isinstance(size, int) and isinstance(end, int):
            first, last, _ = slice(start, end).indices(size)
            if first >= last:
                return value
        return pieces[0] if len(pieces) == 1 else g.op("Concat", *pieces, axis=dim)
    if not isinstance(start, int) or not isinstance(step, int):
        raise NotLowered("assignment to a strided slice whose start or step changes")
    # As many positions as the source has, whatever the end of the slice.
    zero, one = g.constant(0, torch.int64), g.constant(1, torch.int64)
    count = g.op("Squeeze", g.op("Shape", part, start=dim, end=dim + 1))
    index = g.op("Add", g.op("Mul", g.op("Range", zero, count, one), g.constant(step, torch.int64)), g.ints([start]))
    rows = g.op("Reshape", index, g.ints([-1 if d == dim else 1 for d in range(rank_of(x))]))
    return g.op("ScatterElements", value, g.op("Expand", rows, g.shape(src)), part, axis=dim)


@lowers(aten.select_scatter.default)
def select_scatter(g: GraphBuilder, node: fx.Node, x: fx.Node, src: fx.Node, dim: int, index: Any) -> ir.Value:
    if not isinstance(index, int):
        raise NotLowered("assignment to an element whose index changes")
    dim = positive(dim, rank_of(x))
    value = g.value(x)
    pieces = [g.op("Unsqueeze", g.operand(src, dtype_of(node)), g.ints([dim]))]
    if index != 0:
        pieces.insert(0, sliced(g, value, dim, 0, index))
    if index != -1:
        pieces.append(sliced(g, value, dim, index + 1, END))
    return g.op("Concat", *pieces, axis=dim)


@lowers(aten.select_backward.default)
def select_backward(
    g: GraphBuilder, node: fx.Node, grad: fx.Node, sizes: Sequence[Dim], dim: int, index: Any
) -> ir.Value:
    dim = positive(dim, rank_of(node))
    return _placed(g, node, g.op("Unsqueeze", g.value(grad), g.ints([dim])), sizes, dim, index, 1)


@lowers(aten.slice_backward.default)
def slice_backward(
    g: GraphBuilder, node: fx.Node, grad: fx.Node, sizes: Sequence[Dim], dim: int, start: Any, end: Any, step: Any
) -> ir.Value:
    dim = positive(dim, rank_of(node))
    if not isinstance(step, int):
        raise NotLowered("the gradient of a slice whose step changes")
    value = g.value(grad)
    if step > 1:  # zeros after each element, some of which may stand beyond the end
        length = g.op("Shape", value, start=dim, end=dim + 1)
        apart = g.pad(g.op("Unsqueeze", value, g.ints([dim + 1])), rank_of(node) + 1, dim + 1, [0], [step - 1])
        head = [g.op("Shape", value, end=dim)] if dim else []
        tail = [g.op("Shape", value, start=dim + 1)] if dim + 1 < rank_of(node) else []
        shape = [*head, g.op("Mul", length, g.ints([step])), *tail]
        value = g.op("Reshape", apart, g.op("Concat", *shape, axis=0))
    return _placed(g, node, value, sizes, dim, start, shape_of(grad)[dim] if step == 1 else None)


def _placed(
    g: GraphBuilder, node: fx.Node, piece: ir.Value, sizes: Sequence[Dim], dim: int, start: Dim, length: Any
) -> ir.Value:
    """``piece``, of that length along ``dim`` if it is known, among zeros."""
    size = shape_of(node)[dim]
    if isinstance(start, int) and isinstance(size, int) and isinstance(length, int):
        before = min(max(start + size if start < 0 else start, 0), size)
        if before == 0 and length == size:
            return piece
        return g.pad(piece, rank_of(node), dim, [before], [size - length - before])
    total, first, zero = g.dims([sizes[dim]]), g.dims([start]), g.ints([0])
    if not isinstance(start, int):
        first = g.op("Where", g.op("Less", first, zero), g.op("Add", first, total), first)
    elif start < 0:
        first = g.op("Add", total, first)
    first = first if isinstance(start, int) and start >= 0 else g.op("Max", first, zero)
    rest = g.op("Sub", g.op("Sub", total, g.op("Shape", piece, start=dim, end=dim + 1)), first)
    return g.pad(piece, rank_of(node), dim, [first], [rest])


@lowers(aten.cat.default)
def cat(g: GraphBuilder, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> ir.Value:
    rank, dtype = rank_of(node), dtype_of(node)
    # torch skips 1-d empty tensors among others of any rank
    kept = [t for t in tensors if rank_of(t) == rank and not (rank == 1 and is_empty(t))] or list(tensors[:1])
    values = [g.operand(t, dtype) for t in kept]
    return values[0] if len(values) == 1 else g.op("Concat", *values, axis=positive(dim, rank))


@lowers(aten.stack.default)
def stack(g: GraphBuilder, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> ir.Value:
    axis = dim % rank_of(node)
    values = [g.op("Unsqueeze", g.operand(t, dtype_of(node)), g.ints([axis])) for t in tensors]
    return values[0] if len(values) == 1 else g.op("Concat", *values, axis=axis)


@lowers(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default)
def split_with_sizes(g: GraphBuilder, node: fx.Node, x: fx.Node, sizes: Sequence[Dim], dim: int = 0) -> Any:
    if len(sizes) == 1:
        return (g.value(x),)
    return g.op("Split", g.value(x), g.dims(sizes), outputs=len(sizes), axis=dim % rank_of(x))


@lowers(aten.split.Tensor, aten.unsafe_split.Tensor)
def split(g: GraphBuilder, node: fx.Node, x: fx.Node, size: Dim, dim: int = 0) -> Any:
    dim %= rank_of(x)
    parts = len(node.meta["val"])
    if parts == 1:
        return (g.value(x),)
    if isinstance(size, int) and isinstance(total := shape_of(x)[dim], int):
        return g.op(
            "Split", g.value(x), g.ints([min(size, total - size * i) for i in range(parts)]), outputs=parts, axis=dim
        )
    if not isinstance(size, int):
        raise NotLowered("a split into pieces of a changing size")
    pieces = [sliced(g, g.value(x), dim, i * size, (i + 1) * size) for i in range(parts - 1)]
    return (*pieces, sliced(g, g.value(x), dim, (parts - 1) * size, END))


@lowers(aten.unbind.int)
def unbind(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int = 0) -> Any:
    dim %= rank_of(x)
    parts, axes = len(node.meta["val"]), g.ints([dim])
    if parts == 1:
        return (g.op("Squeeze", g.value(x), axes),)
    pieces = g.op("Split", g.value(x), g.ints([1] * parts), outputs=parts, axis=dim)
    return tuple(g.op("Squeeze", p, axes) for p in pieces)


@lowers(aten.flip.default)
def flip(g: GraphBuilder, node: fx.Node, x: fx.Node, dims: Sequence[int]) -> ir.Value:
    axes = [positive(d, rank_of(x)) for d in dims]
    if not axes or rank_of(x) == 0:
        return g.value(x)
    count = len(axes)
    return g.op("Slice", g.value(x), g.ints([-1] * count), g.ints([-END] * count), g.ints(axes), g.ints([-1] * count))


@lowers(aten.roll.default)
def roll(g: GraphBuilder, node: fx.Node, x: fx.Node, shifts: Sequence[Any], dims: Sequence[int] = ()) -> ir.Value:
    value, pairs = g.value(x), zip(shifts, dims, strict=False)
    if is_empty(x):
        return value
    if not dims:
        value, pairs = g.op("Reshape", value, g.ints([-1])), zip(shifts, [0], strict=True)
    for shift, dim in pairs:
        size = shape_of(x)[dim] if dims else x.meta["val"].numel()
        if not isinstance(shift, int):
            raise NotLowered("a roll by a changing number of elements")
        if isinstance(size, int):
            shift = shift % size if size else 0
        if shift == 0:
            continue
        axis = positive(dim, rank_of(x)) if dims else 0
        # With a symbolic size, a shift beyond it would need a modulo.
        cut: Dim | ir.Value = -shift
        if not isinstance(size, int):
            cut = _wrapped(g, value, axis, -shift)
        tail, head = _from(g, value, axis, cut), _until(g, value, axis, cut)
        value = g.op("Concat", tail, head, axis=axis)
    return value if dims else g.op("Reshape", value, g.shape(x))


def _wrapped(g: GraphBuilder, value: ir.Value, axis: int, index: int) -> ir.Value:
    return g.op("Mod", g.ints([index]), g.op("Shape", value, start=axis, end=axis + 1))


def _from(g: GraphBuilder, value: ir.Value, axis: int, cut: int | ir.Value) -> ir.Value:
    start = g.ints([cut]) if isinstance(cut, int) else cut
    return g.op("Slice", value, start, g.ints([END]), g.ints([axis]))


def _until(g: GraphBuilder, value: ir.Value, axis: int, cut: int | ir.Value) -> ir.Value:
    end = g.ints([cut]) if isinstance(cut, int) else cut
    return g.op("Slice", value, g.ints([0]), end, g.ints([axis]))


@lowers(aten.unfold.default)
def unfold(g: GraphBuilder, node: fx.Node, x: fx.Node, dimension: int, size: int, step: int) -> ir.Value:
    """Windows along ``dimension``, the place inside a window as the last dimension."""
    rank = rank_of(x)
    if rank == 0:
        return g.op("Unsqueeze", g.value(x), g.ints([0]))
    dim = dimension % rank
    windows = shape_of(node)[dim]
    if isinstance(windows, int):
        index = g.constant([[w * step + i for i in range(size)] for w in range(windows)], torch.int64)
    else:
        last = g.op("Sub", g.op("Shape", g.value(x), start=dim, end=dim + 1), g.constant(size - 1, torch.int64))
        starts = g.op("Range", g.constant(0, torch.int64), g.op("Squeeze", last), g.constant(step, torch.int64))
        index = g.op("Add", g.op("Unsqueeze", starts, g.ints([1])), g.ints(list(range(size))))
    gathered = g.op("Gather", g.value(x), index, axis=dim)
    perm = [d for d in range(rank + 1) if d != dim + 1] + [dim + 1]
    return g.op("Transpose", gathered, perm=perm)
