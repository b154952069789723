"""Tensors made from numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import Dim, GraphBuilder, dtype_of, shape_of
from lightning_ort.compiler.lowering.registry import NotLowered, lowers
from lightning_ort.runtime.tensors import NUMPY

aten = torch.ops.aten

# A larger constant is computed by ONNX Runtime instead of being stored in the model.
STORED = 4096


def filled(g: GraphBuilder, node: fx.Node, size: Sequence[Dim] | ir.Value, value: Any) -> ir.Value:
    """A tensor in the dtype of ``node`` with every element ``value``: a number or an fx node of one."""
    dtype = dtype_of(node)
    if dtype not in NUMPY:
        raise NotLowered(f"no constants of {dtype}")
    if shape_of(node) and not isinstance(value, fx.Node):
        g.compact[node] = g.constant(value, dtype)
    shape = size if isinstance(size, ir.Value) else g.dims(size)
    if isinstance(value, fx.Node):
        return g.op("Expand", g.operand(value, dtype), shape)
    if not isinstance(size, ir.Value) and all(isinstance(d, int) for d in size):
        sizes = [int(d) for d in size]
        if math.prod(sizes) <= STORED:
            return g.constant(np.full(sizes, value), dtype)
    element = ir.tensor(np.asarray([value]).astype(NUMPY[dtype]))
    return g.op("ConstantOfShape", shape, value=element)


def _size(node: fx.Node, size: Sequence[Any]) -> list[Dim]:
    return [r if isinstance(r, int) else s for r, s in zip(shape_of(node), size, strict=True)]


@lowers(aten.full.default)
def full(g: GraphBuilder, node: fx.Node, size: Sequence[Dim], value: Any, **_: Any) -> ir.Value:
    return filled(g, node, _size(node, size), value)


# What torch leaves uninitialised is 0 here: whoever reads it reads a number all the same.
@lowers(
    aten.zeros.default,
    aten.empty.memory_format,
    aten.empty_permuted.default,
    aten.empty_strided.default,
    aten._efficientzerotensor.default,
)
def zeros(g: GraphBuilder, node: fx.Node, size: Sequence[Dim], *_: Any, **__: Any) -> ir.Value:
    return filled(g, node, _size(node, size), 0)


@lowers(aten.ones.default)
def ones(g: GraphBuilder, node: fx.Node, size: Sequence[Dim], **_: Any) -> ir.Value:
    return filled(g, node, _size(node, size), 1)


def _like(g: GraphBuilder, node: fx.Node, x: fx.Node, value: Any) -> ir.Value:
    shape = shape_of(node)
    if all(isinstance(d, int) for d in shape):
        return filled(g, node, list(shape), value)
    return filled(g, node, g.shape(x), value)


@lowers(aten.full_like.default, aten.fill.Scalar, aten.fill.Tensor)
def full_like(g: GraphBuilder, node: fx.Node, x: fx.Node, value: Any, **_: Any) -> ir.Value:
    return _like(g, node, x, value)


@lowers(aten.zeros_like.default, aten.empty_like.default)
def zeros_like(g: GraphBuilder, node: fx.Node, x: fx.Node, **_: Any) -> ir.Value:
    return _like(g, node, x, 0)


@lowers(aten.ones_like.default)
def ones_like(g: GraphBuilder, node: fx.Node, x: fx.Node, **_: Any) -> ir.Value:
    return _like(g, node, x, 1)


@lowers(aten.new_full.default)
def new_full(g: GraphBuilder, node: fx.Node, x: fx.Node, size: Sequence[Dim], value: Any, **_: Any) -> ir.Value:
    return filled(g, node, _size(node, size), value)


@lowers(aten.new_zeros.default, aten.new_empty.default, aten.new_empty_strided.default)
def new_zeros(g: GraphBuilder, node: fx.Node, x: fx.Node, size: Sequence[Dim], *_: Any, **__: Any) -> ir.Value:
    return filled(g, node, _size(node, size), 0)


@lowers(aten.new_ones.default)
def new_ones(g: GraphBuilder, node: fx.Node, x: fx.Node, size: Sequence[Dim], **_: Any) -> ir.Value:
    return filled(g, node, _size(node, size), 1)


@lowers(aten.scalar_tensor.default)
def scalar_tensor(g: GraphBuilder, node: fx.Node, value: Any, **_: Any) -> ir.Value:
    return g.operand(value, dtype_of(node))


@lowers(aten.arange.start_step)
def arange(g: GraphBuilder, node: fx.Node, start: Any, end: Any, step: Any = 1, **_: Any) -> ir.Value:
    dtype = dtype_of(node)
    length = shape_of(node)[0]
    if isinstance(length, int) and not any(isinstance(a, fx.Node) for a in (start, end, step)):
        return g.constant(torch.arange(start, end, step, dtype=dtype, device="cpu").numpy(), dtype)
    if any(isinstance(a, float) for a in (start, end, step)) or dtype_of_step(step) != torch.int64:
        raise NotLowered("arange of floating-point bounds that change")
    first, limit, stride = (g.operand(a, torch.int64) for a in (start, end, step))
    if isinstance(start, int) and isinstance(step, int) and start >= 0 and step > 0:
        values = g.op("Range", first, limit, stride)
    else:  # ONNX Runtime slices by a Range that is an index, where a bound below 0 counts from the end
        distance = g.op("Range", g.constant(0, torch.int64), g.op("Sub", first, limit), g.op("Neg", stride))
        values = g.op("Sub", first, distance)
    return g.cast(values, torch.int64, dtype)


def dtype_of_step(step: Any) -> torch.dtype:
    return dtype_of(step) if isinstance(step, fx.Node) else torch.int64


@lowers(aten.arange.default)
def arange_end(g: GraphBuilder, node: fx.Node, end: Any, **_: Any) -> ir.Value:
    return arange(g, node, 0, end)


@lowers(aten.arange.start)
def arange_start(g: GraphBuilder, node: fx.Node, start: Any, end: Any, **_: Any) -> ir.Value:
    return arange(g, node, start, end)


@lowers(aten.eye.default, aten.eye.m)
def eye(g: GraphBuilder, node: fx.Node, n: Dim, m: Any = None, **_: Any) -> ir.Value:
    dtype = dtype_of(node)
    rows, columns = shape_of(node)
    if isinstance(rows, int) and isinstance(columns, int):
        return g.constant(np.eye(rows, columns), dtype)
    count = g.operand(n, torch.int64), g.operand(n if m is None else m, torch.int64)
    first, second = (g.op("Range", g.constant(0, torch.int64), c, g.constant(1, torch.int64)) for c in count)
    return g.cast(g.op("Equal", g.op("Unsqueeze", first, g.ints([1])), second), torch.bool, dtype)


@lowers(aten.tril_indices.default)
def tril_indices(g: GraphBuilder, node: fx.Node, row: int, col: int, offset: int = 0, **_: Any) -> ir.Value:
    return g.constant(np.stack(np.tril_indices(row, offset, col)), dtype_of(node))


@lowers(aten.triu_indices.default)
def triu_indices(g: GraphBuilder, node: fx.Node, row: int, col: int, offset: int = 0, **_: Any) -> ir.Value:
    return g.constant(np.stack(np.triu_indices(row, offset, col)), dtype_of(node))
