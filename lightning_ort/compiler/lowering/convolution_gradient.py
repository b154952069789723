"""The gradient of a convolution's weight as one matrix product, in the form that is fastest for its shape.

Timed on two Zen 4 cores with ONNX Runtime 1.31, milliseconds, against torch (oneDNN):

===========================  ======  =======  =====  ======  ===========
images, channels, size       images  pixels   taps   joined  torch
===========================  ======  =======  =====  ======  ===========
32 x 3 -> 32, 32 x 32          1.25     2.70   5.33    1.57         0.96
16 x 64 -> 64, 32 x 32        12.94    15.67  34.21   11.52         7.30
16 x 128 -> 128, 16 x 16      12.13    11.64  27.68   10.76         6.36
16 x 512 -> 512, 4 x 4        31.29     8.48  10.03   22.19         7.19
===========================  ======  =======  =====  ======  ===========

``taps`` is one product per element of the kernel; a convolution with swapped axes takes 15 to 97 ms.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from lightning_ort.compiler.lowering.builder import CONTRIB, GraphBuilder
from lightning_ort.compiler.lowering.windows import Sizes, Window, concatenated, tap_slices

__all__ = ["not_before", "weight_gradient"]


def weight_gradient(
    g: GraphBuilder,
    image: ir.Value,
    channels: int,
    grad: ir.Value,
    grad_channels: int,
    groups: int,
    window: Window,
    positions: Sizes,
    single: bool,
) -> ir.Value:
    """Gradient of the weight (grad_channels, channels / groups, *kernel) of a convolution ``image`` -> ``grad``.

    ``positions`` are the spatial sizes of ``grad``; ``single`` tells single from double precision.
    """
    per_group = channels // groups
    area = math.prod(positions) if isinstance(positions, list) else None
    if groups > 1 or not single:
        product = _grouped(g, image, channels, grad, grad_channels, groups, window, positions, single)
    elif area is not None and area >= 64 and (window.taps == 1 or channels * window.taps <= 48):
        product = _by_image(g, image, channels, grad, grad_channels, window, positions)
    elif area is not None and area <= 64:
        product = _by_pixel(g, image, channels, grad, grad_channels, window, positions)
    else:
        product = _joined(g, image, channels, grad, grad_channels, window, positions)
    if window.taps > 1 and per_group > 1:
        product = g.op("Reshape", product, g.ints([grad_channels, window.taps, per_group]))
        product = g.op("Transpose", product, perm=[0, 2, 1])
    return g.op("Reshape", product, g.ints([grad_channels, per_group, *window.kernel]))


def not_before(g: GraphBuilder, value: ir.Value, other: ir.Value, rank: int) -> ir.Value:
    """``value``, of ``rank`` dimensions, for nodes that are not to run before ``other`` is there.

    Of the nodes that can run ONNX Runtime takes the one that was written first. Those that its optimizers make are the
    last ones: while one of them is waited for, the columns of all convolutions would be made, many times as large as
    the images, and wait in memory for their gradients.
    """
    size = g.op("Size", other)  # a shape would be known before anything runs
    kept = g.op("Add", g.ints([0] * rank), g.op("Sub", size, size))
    return g.op("Reshape", value, kept)


def _channels_first(g: GraphBuilder, value: ir.Value, window: Window) -> ir.Value:
    return g.op("Transpose", value, perm=[1, 0, *range(2, 2 + window.rank)])


def _joined(
    g: GraphBuilder,
    image: ir.Value,
    channels: int,
    grad: ir.Value,
    grad_channels: int,
    window: Window,
    positions: Sizes,
) -> ir.Value:
    """(grad_channels, all pixels) times (all pixels, taps x channels), by rows of pixels."""
    columns = concatenated(g, tap_slices(g, _channels_first(g, image, window), 2, window, positions), 0)
    columns = g.op("Reshape", columns, g.ints([window.taps * channels, -1]))
    rows = g.op("Reshape", _channels_first(g, grad, window), g.ints([grad_channels, -1]))
    return g.op("Gemm", rows, columns, transB=1)


def _by_pixel(
    g: GraphBuilder,
    image: ir.Value,
    channels: int,
    grad: ir.Value,
    grad_channels: int,
    window: Window,
    positions: Sizes,
) -> ir.Value:
    """(grad_channels, all pixels) times (all pixels, taps x channels), channels last."""
    pixels = g.op("Transpose", image, perm=[0, *range(2, 2 + window.rank), 1])
    columns = concatenated(g, tap_slices(g, pixels, 1, window, positions), 1 + window.rank)
    columns = g.op("Reshape", columns, g.ints([-1, window.taps * channels]))
    rows = g.op("Reshape", _channels_first(g, grad, window), g.ints([grad_channels, -1]))
    return g.op("MatMul", rows, columns)


def _by_image(
    g: GraphBuilder,
    image: ir.Value,
    channels: int,
    grad: ir.Value,
    grad_channels: int,
    window: Window,
    positions: Sizes,
) -> ir.Value:
    """One product per image, added up: nothing is transposed, but every image has a result of its own."""
    columns = concatenated(g, tap_slices(g, image, 2, window, positions), 1)
    columns = g.op("Reshape", columns, g.ints([0, window.taps * channels, -1]))
    rows = g.op("Reshape", grad, g.ints([0, grad_channels, -1]))
    products = g.op("FusedMatMul", rows, columns, domain=CONTRIB, transB=1)
    return g.op("ReduceSum", products, g.ints([0]), keepdims=0)


def _grouped(
    g: GraphBuilder,
    image: ir.Value,
    channels: int,
    grad: ir.Value,
    grad_channels: int,
    groups: int,
    window: Window,
    positions: Sizes,
    single: bool,
) -> ir.Value:
    """(groups, grad_channels / groups, all pixels) times (groups, all pixels, taps x channels / groups)."""
    slices = tap_slices(g, _channels_first(g, image, window), 2, window, positions)
    slices = [g.op("Reshape", s, g.ints([groups, channels // groups, -1])) for s in slices]
    columns = concatenated(g, slices, 1)
    rows = g.op("Reshape", _channels_first(g, grad, window), g.ints([groups, grad_channels // groups, -1]))
    if single:
        return g.op("FusedMatMul", rows, columns, domain=CONTRIB, transB=1)
    # The reshape keeps ONNX Runtime 1.19 from fusing the transposition into a product that it lacks for doubles.
    columns = g.op("Transpose", columns, perm=[0, 2, 1])
    return g.op("MatMul", rows, g.op("Reshape", columns, g.ints([groups, -1, channels // groups * window.taps])))
