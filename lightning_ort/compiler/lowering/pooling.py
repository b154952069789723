"""Max pooling over windows, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, rank_of, shape_of
from lightning_ort.compiler.lowering.registry import NotLowered, lowers

aten = torch.ops.aten


def _spread(values: Sequence[int], n: int) -> list[int]:
    return [int(values[0])] * n if len(values) == 1 else [int(v) for v in values]


def _batched(g: GraphBuilder, x: fx.Node, value: ir.Value, spatial: int) -> ir.Value:
    """``value`` with a batch dimension, which ONNX asks for."""
    return value if rank_of(x) == spatial + 2 else g.op("Unsqueeze", value, g.ints([0]))


def _unbatched(g: GraphBuilder, x: fx.Node, value: ir.Value, spatial: int) -> ir.Value:
    return value if rank_of(x) == spatial + 2 else g.op("Squeeze", value, g.ints([0]))


def _end_padding(x: fx.Node, node: fx.Node, kernel: list[int], stride: list[int], padding: list[int],
                 dilation: list[int], ceil_mode: bool) -> list[int]:  # fmt: skip
    """Padding after the last element such that rounding down gives torch's output size."""
    if not ceil_mode:
        return padding
    spatial = len(kernel)
    ends = []
    for size, out, k, s, p, d in zip(
        shape_of(x)[-spatial:], node.meta["val"][0].shape[-spatial:], kernel, stride, padding, dilation, strict=True
    ):
        if not isinstance(size, int):
            raise NotLowered("ceil_mode over an image of dynamic size")
        ends.append(max(padding[0] * 0 + p, (int(out) - 1) * s + d * (k - 1) + 1 - int(size) - p))
    return ends


def _max_pool(
    g: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
    *,
    spatial: int,
) -> tuple[ir.Value, ir.Value]:
    dtype = dtype_of(x)
    if dtype not in (torch.float32, torch.float64):
        raise NotLowered(f"max pooling of {dtype}")
    kernel = _spread(kernel_size, spatial)
    strides = _spread(stride, spatial) if len(stride) else kernel
    pads, dilations = _spread(padding, spatial), _spread(dilation, spatial)
    ends = _end_padding(x, node, kernel, strides, pads, dilations, ceil_mode)
    if any(e >= k for e, k in zip(ends, kernel, strict=True)):
        raise NotLowered("max pooling that pads by a whole window")
    out, flat = g.op(
        "MaxPool", _batched(g, x, g.value(x), spatial), outputs=2,
        kernel_shape=kernel, strides=strides, pads=[*pads, *ends], dilations=dilations,
    )  # fmt: skip
    # ONNX counts through the whole tensor, torch through one image
    plane = shape_of(x)[-spatial:]
    if not all(isinstance(s, int) for s in plane):
        area = g.op("ReduceProd", g.op("Shape", g.value(x), start=-spatial), keepdims=0)
    else:
        area = g.constant(math.prod(int(s) for s in plane), torch.int64)
    indices = _unbatched(g, x, g.op("Mod", flat, area), spatial)
    indices.meta["flat"] = flat
    return _unbatched(g, x, out, spatial), indices


@lowers(aten.max_pool2d_with_indices.default)
def max_pool2d(g: GraphBuilder, node: fx.Node, *args, **kwargs) -> tuple[ir.Value, ir.Value]:
    return _max_pool(g, node, *args, **kwargs, spatial=2)


@lowers(aten.max_pool3d_with_indices.default)
def max_pool3d(g: GraphBuilder, node: fx.Node, *args, **kwargs) -> tuple[ir.Value, ir.Value]:
    return _max_pool(g, node, *args, **kwargs, spatial=3)


def _max_pool_backward(
    g: GraphBuilder,
    grad: fx.Node,
    x: fx.Node,
    indices: fx.Node,
    spatial: int,
) -> ir.Value:
    """Add each incoming gradient at the place its maximum came from."""
    dtype = dtype_of(grad)
    plane = shape_of(x)[-spatial:]
    shape = g.shape(x)
    area = math.prod(int(s) for s in plane) if all(isinstance(s, int) for s in plane) else None
    if area is None:
        raise NotLowered("gradient of max pooling over an image of dynamic size")
    outs = shape_of(grad)[-spatial:]
    columns = math.prod(int(s) for s in outs)
    flat_grad = g.op("Reshape", g.value(grad), g.ints([-1, columns]))
    flat_index = g.op("Reshape", g.value(indices), g.ints([-1, columns]))
    rows = g.op("Shape", flat_grad, end=1)
    zeros = g.op("Expand", g.constant(0, dtype), g.op("Concat", rows, g.ints([area]), axis=0))
    return g.op("Reshape", g.op("ScatterElements", zeros, flat_index, flat_grad, axis=1, reduction="add"), shape)


@lowers(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_backward(g: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, *args) -> ir.Value:
    return _max_pool_backward(g, grad, x, args[-1], spatial=2)


@lowers(aten.max_pool3d_with_indices_backward.default)
def max_pool3d_backward(g: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, *args) -> ir.Value:
    return _max_pool_backward(g, grad, x, args[-1], spatial=3)
