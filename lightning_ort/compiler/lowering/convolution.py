"""Convolution and transposed convolution of any rank, forward and backward."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, rank_of, shape_of
from lightning_ort.compiler.lowering.registry import NotLowered, lowers

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class _Window:
    """How a kernel moves over an image: one entry per spatial dimension."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    @property
    def rank(self) -> int:
        return len(self.kernel)

    def taps(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*(range(k) for k in self.kernel)))

    def attributes(self) -> dict[str, Any]:
        return {
            "kernel_shape": self.kernel,
            "strides": self.stride,
            "pads": [*self.padding, *self.padding],
            "dilations": self.dilation,
            "group": self.groups,
        }


def _window(
    weight: fx.Node, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> _Window:
    n = rank_of(weight) - 2
    kernel = shape_of(weight)[2:]
    if not all(isinstance(k, int) for k in kernel):
        raise NotLowered("convolution with a kernel of dynamic size")

    def spread(values: Sequence[int]) -> list[int]:
        return [int(values[0])] * n if len(values) == 1 else [int(v) for v in values]

    return _Window([int(k) for k in kernel], spread(stride), spread(padding), spread(dilation), groups)


def _static(sizes: Sequence[Any], what: str) -> list[int]:
    if not all(isinstance(s, int) for s in sizes):
        raise NotLowered(f"{what} of an image of dynamic size")
    return [int(s) for s in sizes]


@lowers(aten.convolution.default)
def convolution(
    g: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    bias: fx.Node | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> ir.Value:
    window = _window(weight, stride, padding, dilation, groups)
    if dtype_of(x) != torch.float32:
        raise NotLowered(f"convolution of {dtype_of(x)}")
    b = g.value(bias) if bias is not None else None
    if not transposed:
        return g.op("Conv", g.value(x), g.value(weight), b, **window.attributes())
    extra = [int(p) for p in output_padding]
    extra = extra * window.rank if len(extra) == 1 else extra
    return g.op("ConvTranspose", g.value(x), g.value(weight), b, **window.attributes(), output_padding=extra)


def _columns(g: GraphBuilder, image: ir.Value, window: _Window, out: list[int]) -> ir.Value:
    """im2col, channels first: (taps * channels, batch * positions) of an image (batch, channels, ...)."""
    if any(window.padding):
        pads = [0, 0, *window.padding]
        image = g.op("Pad", image, g.ints(pads * 2))
    image = g.op("Transpose", image, perm=[1, 0, *range(2, 2 + window.rank)])
    pieces = []
    for tap in window.taps():
        starts = [t * d for t, d in zip(tap, window.dilation, strict=True)]
        ends = [a + (o - 1) * s + 1 for a, o, s in zip(starts, out, window.stride, strict=True)]
        axes = g.ints(range(2, 2 + window.rank))
        pieces.append(g.op("Slice", image, g.ints(starts), g.ints(ends), axes, g.ints(window.stride)))
    return pieces[0] if len(pieces) == 1 else g.op("Concat", *pieces, axis=0)


def _weight_gradient(
    g: GraphBuilder, image: ir.Value, channels: int, grad: ir.Value, grad_channels: int, window: _Window, out: list[int]
) -> ir.Value:
    """Gradient of the weight (grad_channels, channels / groups, *kernel) of a convolution image -> grad."""
    taps, groups = len(window.taps()), window.groups
    columns = _columns(g, image, window, out)
    rows = g.op("Transpose", grad, perm=[1, 0, *range(2, 2 + window.rank)])
    if groups == 1:
        rows = g.op("Reshape", rows, g.ints([grad_channels, -1]))
        columns = g.op("Reshape", columns, g.ints([taps * channels, -1]))
        product = g.op("Gemm", rows, columns, transB=1)
        product = g.op("Reshape", product, g.ints([grad_channels, taps, channels]))
        product = g.op("Transpose", product, perm=[0, 2, 1])
    else:
        per_group, grad_per_group = channels // groups, grad_channels // groups
        rows = g.op("Reshape", rows, g.ints([groups, grad_per_group, -1]))
        columns = g.op("Reshape", columns, g.ints([taps, groups, per_group, -1]))
        columns = g.op("Transpose", columns, perm=[1, 3, 2, 0])
        columns = g.op("Reshape", columns, g.ints([groups, -1, per_group * taps]))
        product = g.op("MatMul", rows, columns)
    return g.op("Reshape", product, g.ints([grad_channels, channels // groups, *window.kernel]))


@lowers(aten.convolution_backward.default)
def convolution_backward(
    g: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[ir.Value | None, ...]:
    window = _window(weight, stride, padding, dilation, groups)
    if dtype_of(x) != torch.float32:
        raise NotLowered(f"convolution of {dtype_of(x)}")
    dy = g.value(grad)
    image_sizes = _static(shape_of(x)[2:], "gradient of a convolution")
    grad_sizes = _static(shape_of(grad)[2:], "gradient of a convolution")
    channels, grad_channels = int(shape_of(x)[1]), int(shape_of(grad)[1])
    dx = dw = db = None
    if output_mask[0] and not transposed:
        reached = [
            (o - 1) * s - 2 * p + d * (k - 1) + 1
            for o, s, p, d, k in zip(
                grad_sizes, window.stride, window.padding, window.dilation, window.kernel, strict=True
            )
        ]
        extra = [i - r for i, r in zip(image_sizes, reached, strict=True)]
        dx = g.op("ConvTranspose", dy, g.value(weight), **window.attributes(), output_padding=extra)
    elif output_mask[0]:
        dx = g.op("Conv", dy, g.value(weight), **window.attributes())
    if output_mask[1] and not transposed:
        dw = _weight_gradient(g, g.value(x), channels, dy, grad_channels, window, grad_sizes)
    elif output_mask[1]:
        dw = _weight_gradient(g, dy, grad_channels, g.value(x), channels, window, image_sizes)
    if output_mask[2]:
        db = g.op("ReduceSum", dy, g.ints([0, *range(2, 2 + window.rank)]), keepdims=0)
    return dx, dw, db
