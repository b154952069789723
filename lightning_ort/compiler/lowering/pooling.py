"""Pooling over windows: maxima, forward and backward, and averages."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler import custom_ops  # noqa: F401  defines the operator
from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, rank_of, shape_of
from lightning_ort.compiler.lowering.finite import is_finite
from lightning_ort.compiler.lowering.registry import NotLowered, lowers
from lightning_ort.compiler.lowering.windows import image_sizes, spread

aten = torch.ops.aten


def _batched(g: GraphBuilder, x: fx.Node, value: ir.Value, spatial: int) -> ir.Value:
    """``value`` with a batch dimension, which ONNX asks for."""
    return value if rank_of(x) == spatial + 2 else g.op("Unsqueeze", value, g.ints([0]))


def _unbatched(g: GraphBuilder, x: fx.Node, value: ir.Value, spatial: int) -> ir.Value:
    return value if rank_of(x) == spatial + 2 else g.op("Squeeze", value, g.ints([0]))


def _end_padding(
    x: fx.Node,
    node: fx.Node,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> list[int]:
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
        ends.append(max(p, (int(out) - 1) * s + d * (k - 1) + 1 - size - p))
    return ends


def _reads_indices(node: fx.Node) -> bool:
    return any(user.target is not operator.getitem or user.args[1] == 1 for user in node.users)


def _plane(g: GraphBuilder, x: fx.Node, spatial: int) -> ir.Value:
    """Number of pixels of one image, a scalar."""
    sizes = image_sizes(g, x, spatial)
    if isinstance(sizes, list):
        return g.constant(math.prod(sizes), torch.int64)
    return g.op("ReduceProd", sizes, keepdims=0)


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
) -> tuple[ir.Value, ir.Value | None]:
    dtype = dtype_of(x)
    if dtype not in (torch.float32, torch.float64):
        raise NotLowered(f"max pooling of {dtype}")
    kernel = spread(kernel_size, spatial)
    strides = spread(stride, spatial) if len(stride) else kernel
    pads, dilations = spread(padding, spatial), spread(dilation, spatial)
    ends = _end_padding(x, node, kernel, strides, pads, dilations, ceil_mode)
    if any(e >= k for e, k in zip(ends, kernel, strict=True)):
        raise NotLowered("max pooling that pads by a whole window")
    image = _batched(g, x, g.value(x), spatial)
    window: dict[str, Any] = {
        "kernel_shape": kernel,
        "strides": strides,
        "pads": [*pads, *ends],
        "dilations": dilations,
    }
    is_disjoint = strides == kernel and not any(pads) and not any(ends) and all(d == 1 for d in dilations)
    if is_disjoint and not _reads_indices(node) and _has_disjoint_gradient(x, kernel):
        return _suffix_maxima(g, _taps(g, x, node.meta["val"][0].shape[2:], kernel, image))[0], None
    # The kernels pass over NaN, and start from the lowest number where torch's start from -inf: at half the size, no
    # other number is as low.
    half = g.op("Mul", image, g.constant(0.5, dtype))
    if not _reads_indices(node):  # five times as fast
        spoilt = g.op("MaxPool", g.cast(g.op("IsNaN", image), torch.bool, torch.float32), **window)
        spoilt = g.cast(spoilt, torch.float32, torch.bool)
        return _unbatched(g, x, _whole(g, g.op("MaxPool", half, **window), spoilt, dtype), spatial), None
    # what the kernel starts from has no place
    out, flat = g.op("MaxPool", g.op("Max", half, g.constant(_SECOND_LOWEST[dtype], dtype)), outputs=2, **window)
    # ONNX counts through the whole tensor, torch through one image
    plane = _plane(g, x, spatial)
    indices = g.op("Mod", flat, plane)
    # the last NaN of a window is its maximum
    last = g.op("MaxPool", _numbered_nans(g, x, image, plane, spatial), **window)
    spoilt = g.op("Greater", last, g.constant(0, torch.float64))
    before = g.op("Sub", g.cast(last, torch.float64, torch.int64), g.constant(1, torch.int64))
    indices = g.where(spoilt, before, indices, torch.int64)
    return _unbatched(g, x, _whole(g, out, spoilt, dtype), spatial), _unbatched(g, x, indices, spatial)


_SECOND_LOWEST = {
    torch.float32: float(np.nextafter(np.finfo(np.float32).min, np.float32(0))),
    torch.float64: float(np.nextafter(np.finfo(np.float64).min, 0.0)),
}


def _whole(g: GraphBuilder, half: ir.Value, spoilt: ir.Value, dtype: torch.dtype) -> ir.Value:
    """The maxima from their halves, with -inf where the kernel has met no number, and NaN where a window has one."""
    is_lowest = g.op("LessOrEqual", half, g.constant(_SECOND_LOWEST[dtype], dtype))
    out = g.where(is_lowest, g.constant(-math.inf, dtype), g.op("Add", half, half), dtype)
    return g.where(spoilt, g.constant(math.nan, dtype), out, dtype)


def _numbered_nans(g: GraphBuilder, x: fx.Node, image: ir.Value, plane: ir.Value, spatial: int) -> ir.Value:
    """The place of each NaN in its image, counted from 1, and 0 for all else, as float64."""
    one, sizes = g.constant(1, torch.int64), image_sizes(g, x, spatial)
    places = g.op("Range", one, g.op("Add", plane, one), one)
    grid = g.op("Reshape", places, g.ints(sizes) if isinstance(sizes, list) else sizes)
    is_nan = g.cast(g.op("IsNaN", image), torch.bool, torch.float64)
    return g.op("Mul", is_nan, g.cast(grid, torch.int64, torch.float64))


def _has_disjoint_gradient(x: fx.Node, kernel: Sequence[int]) -> bool:
    own = torch.ops.lightning_ort.max_pool_backward.default
    return any(user.target is own and user.args[1] is x and list(user.args[2]) == list(kernel) for user in x.users)


def _taps(
    g: GraphBuilder, x: fx.Node, positions: Sequence[Any], kernel: Sequence[int], value: ir.Value
) -> list[ir.Value]:
    """For each element of a window that moves by its own size, the pixels that it meets."""
    rank = len(kernel)
    steps, axes = g.ints(kernel), g.ints(range(2, 2 + rank))
    ends = _covered(g, x, positions, kernel)
    taps = itertools.product(*(range(k) for k in kernel))
    return [g.op("Slice", value, g.ints(tap), ends, axes, steps) for tap in taps]


def _covered(g: GraphBuilder, x: fx.Node, positions: Sequence[Any], kernel: Sequence[int]) -> ir.Value:
    """The sizes of what the windows cover."""
    if all(isinstance(n, int) for n in positions):
        return g.ints([int(n) * k for n, k in zip(positions, kernel, strict=True)])
    sizes = g.op("Shape", g.value(x), start=2)
    return g.op("Sub", sizes, g.op("Mod", sizes, g.ints(kernel)))


def _suffix_maxima(g: GraphBuilder, taps: Sequence[ir.Value]) -> list[ir.Value]:
    """The maximum of each element of a window and those after it; NaN if one is."""
    maxima = [taps[-1]]
    for tap in reversed(taps[:-1]):
        maxima.insert(0, g.op("Max", tap, maxima[0]))
    return maxima


@lowers(aten.max_pool2d_with_indices.default)
def max_pool2d(g: GraphBuilder, node: fx.Node, *args: Any, **kwargs: Any) -> tuple[ir.Value, ir.Value | None]:
    return _max_pool(g, node, *args, **kwargs, spatial=2)


@lowers(aten.max_pool3d_with_indices.default)
def max_pool3d(g: GraphBuilder, node: fx.Node, *args: Any, **kwargs: Any) -> tuple[ir.Value, ir.Value | None]:
    return _max_pool(g, node, *args, **kwargs, spatial=3)


def _scattered(g: GraphBuilder, grad: fx.Node, x: fx.Node, indices: fx.Node, spatial: int) -> ir.Value:
    """Add each incoming gradient at the place its maximum came from."""
    lead = rank_of(x) - spatial
    rows = g.ints([0] * lead + [-1])
    shape = g.op("Concat", g.op("Shape", g.value(x), end=lead), g.op("Reshape", _plane(g, x, spatial), g.ints([1])),
                 axis=0)  # fmt: skip
    zeros = g.op("Expand", g.constant(0, dtype_of(grad)), shape)
    flat_index, flat_grad = g.op("Reshape", g.value(indices), rows), g.op("Reshape", g.value(grad), rows)
    flat = g.op("ScatterElements", zeros, flat_index, flat_grad, axis=lead, reduction="add")
    return g.op("Reshape", flat, g.shape(x))


@lowers(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_backward(g: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, *args: Any) -> ir.Value:
    return _scattered(g, grad, x, args[-1], spatial=2)


@lowers(aten.max_pool3d_with_indices_backward.default)
def max_pool3d_backward(g: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, *args: Any) -> ir.Value:
    return _scattered(g, grad, x, args[-1], spatial=3)


@lowers(torch.ops.lightning_ort.max_pool_backward.default)
def disjoint_max_pool_backward(
    g: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, kernel: Sequence[int]
) -> ir.Value:
    """Hand the gradient from element to element of the window: it stays where none that follows is larger or NaN.

    That is the first maximum, or the last NaN, as in torch. 32 x 32 x 32 x 32 with its forward pass, one core: 3.6 ms;
    by indices 6.4, torch 5.8.
    """
    kernel, dtype = list(kernel), dtype_of(grad)
    taps = _taps(g, x, shape_of(grad)[2:], kernel, g.value(x))
    maxima, rest = _suffix_maxima(g, taps), g.value(grad)
    by_factor = g.chooses_slowly(dtype) and is_finite(grad, products=True)
    zero = g.constant(0, dtype)
    parts: dict[tuple[int, ...], ir.Value] = {}
    numbers = list(itertools.product(*(range(k) for k in kernel)))
    for number, tap, following in zip(numbers[:-1], taps[:-1], maxima[1:], strict=True):
        goes_on = g.op("Or", g.op("Greater", following, tap), g.op("IsNaN", following))
        if by_factor:
            passed = g.op("Mul", rest, g.cast(goes_on, torch.bool, dtype))
            parts[number] = g.op("Sub", rest, passed)
        else:
            parts[number], passed = g.where(goes_on, zero, rest, dtype), g.where(goes_on, rest, zero, dtype)
        rest = passed
    parts[numbers[-1]] = rest
    return _interleaved(g, x, parts, kernel, _covered(g, x, shape_of(grad)[2:], kernel))


def _interleaved(
    g: GraphBuilder, x: fx.Node, parts: dict[tuple[int, ...], ir.Value], kernel: list[int], ends: ir.Value
) -> ir.Value:
    """An image like ``x`` from its elements at each place of a window, zero behind the last window."""
    rank = len(kernel)
    for dim in reversed(range(rank)):
        axis = 3 + dim
        whole = {}
        for prefix in itertools.product(*(range(k) for k in kernel[:dim])):
            pieces = [g.op("Unsqueeze", parts[(*prefix, i)], g.ints([axis])) for i in range(kernel[dim])]
            whole[prefix] = g.op("Concat", *pieces, axis=axis) if len(pieces) > 1 else pieces[0]
        parts = whole
    sizes = shape_of(x)[2:]
    covered = g.op("Concat", g.op("Shape", g.value(x), end=2), ends, axis=0)
    result = g.op("Reshape", parts[()], covered)
    if all(isinstance(n, int) and n % k == 0 for n, k in zip(sizes, kernel, strict=True)):
        return result
    after = g.op("Sub", g.op("Shape", g.value(x), start=2), ends)
    return g.pad(result, 2 + rank, 2, [0] * rank, [after])


def _avg_pool(
    g: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    spatial: int,
) -> ir.Value:
    """Averages over whole windows of a padded image, times what other counts at the border make of them."""
    dtype, sizes, positions = dtype_of(x), shape_of(x)[-spatial:], shape_of(node)[-spatial:]
    if not dtype.is_floating_point or not all(isinstance(n, int) for n in (*sizes, *positions)):
        raise NotLowered("average pooling of integers, or over an image of dynamic size")
    kernel, pads = spread(kernel_size, spatial), spread(padding, spatial)
    strides = spread(stride, spatial) if len(stride) else kernel
    image = _batched(g, x, g.value(x), spatial)
    ends, factors = [], np.ones((1,) * spatial)
    for d, (n, o, k, s, p) in enumerate(zip(sizes, positions, kernel, strides, pads, strict=True)):
        ends.append(max(0, (int(o) - 1) * s + k - int(n) - p))
        if divisor_override is None:
            starts = np.arange(int(o)) * s - p
            stops = np.minimum(starts + k, int(n) + p)
            if not count_include_pad:
                starts, stops = np.maximum(starts, 0), np.minimum(stops, int(n))
            factors = factors * (k / (stops - starts)).reshape([-1 if i == d else 1 for i in range(spatial)])
    if divisor_override is not None:
        factors = factors * (math.prod(kernel) / divisor_override)
    if any(pads) or any(ends):
        image = g.pad(image, 2 + spatial, 2, pads, ends)
    result = g.op("AveragePool", image, kernel_shape=kernel, strides=strides)
    if (factors != 1).any():
        result = g.op("Mul", result, g.constant(factors, dtype))
    return _unbatched(g, x, result, spatial)


@lowers(aten.avg_pool2d.default)
def avg_pool2d(g: GraphBuilder, node: fx.Node, *args: Any, **kwargs: Any) -> ir.Value:
    return _avg_pool(g, node, *args, **kwargs, spatial=2)


@lowers(aten.avg_pool3d.default)
def avg_pool3d(g: GraphBuilder, node: fx.Node, *args: Any, **kwargs: Any) -> ir.Value:
    return _avg_pool(g, node, *args, **kwargs, spatial=3)
