"""Group normalization, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, shape_of
from lightning_ort.compiler.lowering.elementwise import reciprocal_deviation
from lightning_ort.compiler.lowering.registry import NotLowered, lowers

aten = torch.ops.aten


class _Groups:
    """Views of an activation (batch, channels, ...) by group and by channel."""

    def __init__(self, g: GraphBuilder, x: fx.Node, group: int) -> None:
        channels = shape_of(x)[1]
        if not isinstance(channels, int):
            raise NotLowered("group norm over a dynamic number of channels")
        self.g, self.group, self.channels = g, group, channels
        self.dtype = torch.float64 if dtype_of(x) == torch.float64 else torch.float32

    def by_group(self, value: ir.Value) -> ir.Value:
        """(batch, groups, channels of the group x pixels)"""
        return self.g.op("Reshape", value, self.g.ints([0, self.group, -1]))

    def by_channel(self, value: ir.Value) -> ir.Value:
        """(batch, groups, channels of the group, pixels)"""
        return self.g.op("Reshape", value, self.g.ints([0, self.group, self.channels // self.group, -1]))

    def parameter(self, node: fx.Node) -> ir.Value:
        shape = [1, self.group, self.channels // self.group, 1]
        return self.g.op("Reshape", self.g.operand(node, self.dtype), self.g.ints(shape))

    def statistic(self, value: ir.Value) -> ir.Value:
        """A value per group, so that it broadcasts against :meth:`by_channel`."""
        return self.g.op("Unsqueeze", value, self.g.ints([2, 3]))


@lowers(aten.native_group_norm.default)
def native_group_norm(
    g: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    batch: int,
    channels: int,
    pixels: int,
    group: int,
    eps: float,
) -> tuple[ir.Value, ...]:
    groups = _Groups(g, x, group)
    dtype, last = groups.dtype, g.ints([2])
    value = groups.by_group(g.operand(x, dtype))
    mean = g.op("ReduceMean", value, last, keepdims=1)
    centered = g.op("Sub", value, mean)
    variance = g.op("ReduceMean", g.op("Mul", centered, centered), last, keepdims=0)
    rstd = reciprocal_deviation(g, variance, eps, dtype)
    centered, scale = groups.by_channel(centered), groups.statistic(rstd)
    if weight is not None:
        scale = g.op("Mul", scale, groups.parameter(weight))
    result = g.op("Mul", centered, scale)
    if bias is not None:
        result = g.op("Add", result, groups.parameter(bias))
    flat = g.op("Squeeze", mean, last)
    flat.meta["centered"] = (g.value(x), centered)
    result = g.cast(result, dtype, dtype_of(x))
    return g.op("Reshape", result, g.shape(x)), flat, rstd


@lowers(aten.native_group_norm_backward.default)
def native_group_norm_backward(
    g: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    mean: fx.Node,
    rstd: fx.Node,
    weight: fx.Node | None,
    batch: int,
    channels: int,
    pixels: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[ir.Value | None, ...]:
    """a * grad + b * (x - mean) + c with a per channel, b and c per group."""
    groups = _Groups(g, x, group)
    dtype = groups.dtype
    dy, scale = groups.by_channel(g.operand(grad, dtype)), groups.statistic(g.operand(rstd, dtype))
    known = g.value(mean).meta.get("centered")
    if known is not None and known[0] is g.value(x):
        centered = known[1]
    else:
        value = groups.by_channel(g.operand(x, dtype))
        centered = g.op("Sub", value, groups.statistic(g.operand(mean, dtype)))
    last = g.ints([3])
    sums = g.op("ReduceSum", dy, last, keepdims=1)
    products = g.op("ReduceSum", g.op("Mul", dy, centered), last, keepdims=1)
    dx = dw = db = None
    if output_mask[0]:
        w = groups.parameter(weight) if weight is not None else None
        a = g.op("Mul", scale, w) if w is not None else scale
        size = g.op("Div", g.op("Size", dy), g.op("Size", scale))
        per_pixel = g.op("Div", scale, g.cast(size, torch.int64, dtype))
        total = g.op("Mul", sums, w) if w is not None else sums
        moment = g.op("Mul", products, w) if w is not None else products
        c = g.op("Mul", per_pixel, g.op("ReduceSum", total, g.ints([2]), keepdims=1))
        b = g.op("Mul", per_pixel, g.op("ReduceSum", moment, g.ints([2]), keepdims=1))
        b = g.op("Mul", b, g.op("Mul", scale, scale))
        slope = g.op("Add", g.op("Mul", centered, b), c)
        dx = g.cast(g.op("Sub", g.op("Mul", dy, a), slope), dtype, dtype_of(x))
        dx = g.op("Reshape", dx, g.shape(x))
    flat = g.ints([groups.channels])
    if output_mask[1] and weight is not None:
        dw = g.op("ReduceSum", g.op("Mul", products, scale), g.ints([0]), keepdims=0)
        dw = g.cast(g.op("Reshape", dw, flat), dtype, dtype_of(weight))
    if output_mask[2]:
        db = g.op("Reshape", g.op("ReduceSum", sums, g.ints([0]), keepdims=0), flat)
        db = g.cast(db, dtype, dtype_of(weight) if weight is not None else dtype_of(grad))
    return dx, dw, db
