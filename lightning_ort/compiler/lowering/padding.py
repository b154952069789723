"""Padding by a constant, by reflection and by repeating the border."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, rank_of, shape_of
from lightning_ort.compiler.lowering.elementwise import computing_dtype
from lightning_ort.compiler.lowering.registry import NotLowered, lowers

aten = torch.ops.aten


def _padded(g: GraphBuilder, x: fx.Node, value: ir.Value, pad: Sequence[Any], mode: str, fill: Any = None) -> ir.Value:
    """``value`` padded by torch's (left, right, top, bottom, ...), the last dimension first."""
    before, after = pad[0::2][::-1], pad[1::2][::-1]
    return g.pad(value, rank_of(x), rank_of(x) - len(before), before, after, fill, mode)


@lowers(aten.constant_pad_nd.default)
def constant_pad(g: GraphBuilder, node: fx.Node, x: fx.Node, pad: Sequence[Any], value: Any = 0) -> ir.Value:
    out = dtype_of(node)
    dtype = torch.int32 if out == torch.bool else computing_dtype(out)
    fill = g.cast(g.operand(value, out), out, dtype)
    return g.cast(_padded(g, x, g.operand(x, dtype), pad, "constant", fill), dtype, out)


@lowers(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def reflection_pad(g: GraphBuilder, node: fx.Node, x: fx.Node, padding: Sequence[Any]) -> ir.Value:
    return _padded(g, x, g.value(x), padding, "reflect")


@lowers(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def replication_pad(g: GraphBuilder, node: fx.Node, x: fx.Node, padding: Sequence[Any]) -> ir.Value:
    if any(not isinstance(p, int) or p < 0 for p in padding):
        raise NotLowered("replication padding by a negative or dynamic amount")
    return _padded(g, x, g.value(x), padding, "edge")


@lowers(aten.im2col.default)
def im2col(
    g: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> ir.Value:
    """One strided slice of the padded image for each element of the window."""
    height, width = shape_of(x)[-2:]
    if not (isinstance(height, int) and isinstance(width, int)):
        raise NotLowered("unfold of an image of dynamic size")
    image, rank = g.value(x), rank_of(x)
    if any(padding):
        image = g.pad(image, rank, rank - 2, padding, padding)
    out = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, d, p, s in zip((height, width), kernel_size, dilation, padding, stride, strict=True)
    ]
    axes, pieces = g.ints([rank - 2, rank - 1]), []
    for i in range(kernel_size[0]):
        for j in range(kernel_size[1]):
            starts = [i * dilation[0], j * dilation[1]]
            ends = [a + (o - 1) * s + 1 for a, o, s in zip(starts, out, stride, strict=True)]
            piece = g.op("Slice", image, g.ints(starts), g.ints(ends), axes, g.ints(stride))
            pieces.append(g.op("Unsqueeze", piece, g.ints([rank - 2])))
    stacked = g.op("Concat", *pieces, axis=rank - 2)
    columns, positions = int(shape_of(node)[-2]), int(shape_of(node)[-1])
    return g.op("Reshape", stacked, g.ints([-1, columns, positions] if rank == 4 else [columns, positions]))
