"""Convolution and transposed convolution of any rank, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, is_on_cpu, shape_of
from lightning_ort.compiler.lowering.convolution_gradient import not_before, weight_gradient
from lightning_ort.compiler.lowering.registry import NotLowered, lowers
from lightning_ort.compiler.lowering.sums import summed
from lightning_ort.compiler.lowering.windows import (
    Sizes,
    Window,
    concatenated,
    image_sizes,
    spread,
    tap_slices,
    window_of,
    window_positions,
)

aten = torch.ops.aten


def _channels(node: fx.Node, dim: int = 1) -> int:
    size = shape_of(node)[dim]
    if not isinstance(size, int):
        raise NotLowered("convolution over a dynamic number of channels")
    return size


def _computing_dtype(x: fx.Node) -> torch.dtype:
    """ONNX Runtime convolves single precision only; double is written as matrix products."""
    dtype = dtype_of(x)
    if dtype in (torch.float32, torch.float16):
        return torch.float32
    if dtype == torch.float64:
        return dtype
    raise NotLowered(f"convolution of {dtype}")


def _fixed(groups: Any) -> int:
    if not isinstance(groups, int):
        raise NotLowered("convolution with a dynamic number of groups")
    return groups


@lowers(aten.convolution.default)
def convolution(
    g: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    bias: fx.Node | None,
    stride: Sequence[Any],
    padding: Sequence[Any],
    dilation: Sequence[Any],
    transposed: bool,
    output_padding: Sequence[Any],
    groups: int,
) -> ir.Value:
    window, dtype, groups = window_of(weight, stride, padding, dilation), _computing_dtype(x), _fixed(groups)
    image, w = g.operand(x, dtype), g.operand(weight, dtype)
    b = g.operand(bias, dtype) if bias is not None else None
    if transposed:
        extra = spread(output_padding, window.rank)
        inputs = image_sizes(g, x, window.rank)
        result = _transposed(g, image, inputs, w, shape_of(weight), window, groups, extra, dtype, bias=b)
    elif dtype == torch.float32:
        result = g.op("Conv", image, w, b, group=groups, **window.attributes())
    else:
        positions = window_positions(g, image_sizes(g, x, window.rank), window)
        result = _as_product(g, image, w, shape_of(weight), groups, window, positions)
        if b is not None:
            result = g.op("Add", result, g.op("Reshape", b, g.ints([-1] + [1] * window.rank)))
    return g.cast(result, dtype, dtype_of(node))


def _as_product(
    g: GraphBuilder,
    image: ir.Value,
    weight: ir.Value,
    weight_shape: Sequence[Any],
    groups: int,
    window: Window,
    positions: Sizes,
) -> ir.Value:
    """A convolution as im2col and a matrix product for each group."""
    out_channels, per_group = int(weight_shape[0]), int(weight_shape[1])
    slices = tap_slices(g, image, 2, window, positions)
    slices = [g.op("Reshape", s, g.ints([0, groups, per_group, 1, -1])) for s in slices]
    columns = g.op("Reshape", concatenated(g, slices, 3), g.ints([0, groups, per_group * window.taps, -1]))
    rows = g.op("Reshape", weight, g.ints([1, groups, out_channels // groups, per_group * window.taps]))
    product = g.op("MatMul", rows, columns)
    if isinstance(positions, list):
        return g.op("Reshape", product, g.ints([-1, out_channels, *positions]))
    batch = g.op("Shape", image, end=1)
    return g.op("Reshape", product, g.op("Concat", batch, g.ints([out_channels]), positions, axis=0))


def _transposed(
    g: GraphBuilder,
    image: ir.Value,
    inputs: Sizes,
    weight: ir.Value,
    weight_shape: Sequence[Any],
    window: Window,
    groups: int,
    extra: list[int],
    dtype: torch.dtype,
    bias: ir.Value | None = None,
) -> ir.Value:
    """A transposed convolution of an ``image`` with sizes ``inputs``; the result is ``extra`` pixels larger."""
    if dtype == torch.float32 and all(0 <= e < s for e, s in zip(extra, window.stride, strict=True)):
        return g.op("ConvTranspose", image, weight, bias, group=groups, output_padding=extra, **window.attributes())
    if dtype == torch.float32:
        full = Window(window.kernel, window.stride, [0] * window.rank, window.dilation)
        result = g.op("ConvTranspose", image, weight, group=groups, **full.attributes())
        ends = [e - p for e, p in zip(extra, window.padding, strict=True)]
        result = g.pad(result, 2 + window.rank, 2, [-p for p in window.padding], ends)
    else:
        result = _transposed_as_product(g, image, inputs, weight, weight_shape, window, groups, extra)
    if bias is not None:
        result = g.op("Add", result, g.op("Reshape", bias, g.ints([-1] + [1] * window.rank)))
    return result


def _transposed_as_product(
    g: GraphBuilder,
    image: ir.Value,
    inputs: Sizes,
    weight: ir.Value,
    weight_shape: Sequence[Any],
    window: Window,
    groups: int,
    extra: list[int],
) -> ir.Value:
    """Spread the image by the stride, then convolve it with the mirrored kernel."""
    if not isinstance(inputs, list) and any(s > 1 for s in window.stride):
        raise NotLowered("strided transposed convolution in double precision of an image of dynamic size")
    channels, out_per_group = int(weight_shape[0]), int(weight_shape[1])
    sizes = list(inputs) if isinstance(inputs, list) else []
    for i, s in enumerate(window.stride):
        if s > 1:  # s - 1 zeros behind every pixel
            image = g.pad(g.op("Unsqueeze", image, g.ints([3 + i])), 3 + window.rank, 3 + i, [0], [s - 1])
            sizes[i] *= s
            image = g.op("Reshape", image, g.ints([-1, channels, *sizes]))
    before = [r - p for r, p in zip(window.reach, window.padding, strict=True)]
    after = [b + e - (s - 1) for b, e, s in zip(before, extra, window.stride, strict=True)]
    image = g.pad(image, 2 + window.rank, 2, before, after)
    growth = [b + a - r for b, a, r in zip(before, after, window.reach, strict=True)]
    out: Sizes
    if isinstance(inputs, list):
        out = [n + more for n, more in zip(sizes, growth, strict=True)]
    else:
        out = g.op("Add", inputs, g.ints(growth))
    dense = Window(window.kernel, [1] * window.rank, [0] * window.rank, window.dilation)
    mirrored = _mirrored(g, weight, window)
    split = g.op("Reshape", mirrored, g.ints([groups, channels // groups, out_per_group, *window.kernel]))
    turned = g.op("Transpose", split, perm=[0, 2, 1, *range(3, 3 + window.rank)])
    shape = [groups * out_per_group, channels // groups, *window.kernel]
    return _as_product(g, image, g.op("Reshape", turned, g.ints(shape)), shape, groups, dense, out)


def _mirrored(g: GraphBuilder, weight: ir.Value, window: Window) -> ir.Value:
    dims = [i for i, k in enumerate(window.kernel) if k > 1]
    if not dims:
        return weight
    minus = [-1] * len(dims)
    first = [-window.kernel[i] - 1 for i in dims]
    return g.op("Slice", weight, g.ints(minus), g.ints(first), g.ints([2 + i for i in dims]), g.ints(minus))


@lowers(aten.convolution_backward.default)
def convolution_backward(
    g: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[Any],
    padding: Sequence[Any],
    dilation: Sequence[Any],
    transposed: bool,
    output_padding: Sequence[Any],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[ir.Value | None, ...]:
    window, dtype, out = window_of(weight, stride, padding, dilation), _computing_dtype(x), dtype_of(x)
    groups = _fixed(groups)
    image, dy, single = g.operand(x, dtype), g.operand(grad, dtype), dtype == torch.float32
    sizes, grad_sizes = image_sizes(g, x, window.rank), image_sizes(g, grad, window.rank)
    channels, grad_channels = _channels(x), _channels(grad)
    dx = dw = db = None
    if output_mask[0]:
        w = g.operand(weight, dtype)
        if not transposed:
            dx = _input_gradient(g, dy, grad_sizes, w, weight, window, groups, sizes, dtype)
        elif single:
            dx = g.op("Conv", dy, w, group=groups, **window.attributes())
        else:
            dx = _as_product(g, dy, w, shape_of(weight), groups, window, sizes)
        extra = spread(output_padding, window.rank)
        if single and transposed and any(e >= s for e, s in zip(extra, window.stride, strict=True)):
            ends = g.ints(sizes) if isinstance(sizes, list) else sizes
            dx = g.op("Slice", dx, g.ints([0] * window.rank), ends, g.ints(range(2, 2 + window.rank)))
        dx = g.cast(dx, dtype, out)
    if output_mask[1]:
        if transposed:
            dw = weight_gradient(g, dy, grad_channels, image, channels, groups, window, sizes, single)
        else:
            # on a GPU the CPU would compute that size, and the session would have to wait for it in each run
            if window.taps > 1 and is_on_cpu(grad):
                image = not_before(g, image, dy, 2 + window.rank)
            dw = weight_gradient(g, image, channels, dy, grad_channels, groups, window, grad_sizes, single)
        dw = g.cast(dw, dtype, out)
    if output_mask[2]:
        inner = summed(g, dy, shape_of(grad), range(2, 2 + window.rank), dtype)
        db = summed(g, inner, shape_of(grad)[:2], [0], dtype)
        db = g.cast(db, dtype, out)
    return dx, dw, db


def _input_gradient(
    g: GraphBuilder,
    dy: ir.Value,
    grad_sizes: Sizes,
    w: ir.Value,
    weight: fx.Node,
    window: Window,
    groups: int,
    sizes: Sizes,
    dtype: torch.dtype,
) -> ir.Value:
    shape, dense = shape_of(weight), all(s == 1 for s in window.stride)
    before = [r - p for r, p in zip(window.reach, window.padding, strict=True)]
    if dense and groups == 1 and dtype == torch.float32 and shape[1] >= 16 and min(before) >= 0:
        # Conv uses both cores, ConvTranspose adds up its columns on one
        turned = g.op("Transpose", _mirrored(g, w, window), perm=[1, 0, *range(2, 2 + window.rank)])
        return g.op("Conv", dy, turned, kernel_shape=window.kernel, pads=before * 2, dilations=window.dilation)
    if isinstance(sizes, list) and isinstance(grad_sizes, list):
        covered = [
            (n - 1) * s - 2 * p + r + 1
            for n, s, p, r in zip(grad_sizes, window.stride, window.padding, window.reach, strict=True)
        ]
        extra = [n - c for n, c in zip(sizes, covered, strict=True)]
        return _transposed(g, dy, grad_sizes, w, shape, window, groups, extra, dtype)
    if dense:
        return _transposed(g, dy, grad_sizes, w, shape, window, groups, [0] * window.rank, dtype)
    if dtype != torch.float32:
        raise NotLowered("gradient of a strided convolution in double precision over an image of dynamic size")
    full = Window(window.kernel, window.stride, [0] * window.rank, window.dilation)
    result = g.op("ConvTranspose", dy, w, group=groups, **full.attributes())
    target = sizes if not isinstance(sizes, list) else g.ints(sizes)
    after = g.op("Sub", target, g.op("Shape", result, start=2))
    ends = g.op("Add", after, g.ints(window.padding))
    return g.pad(result, 2 + window.rank, 2, [-p for p in window.padding], [ends])
