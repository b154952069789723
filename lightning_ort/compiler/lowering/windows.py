"""A window moved over an image: its geometry, and the parts of the image that each of its elements meets."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import onnx_ir as ir
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, rank_of, shape_of
from lightning_ort.compiler.lowering.registry import NotLowered

__all__ = ["Sizes", "Window", "concatenated", "image_sizes", "spread", "tap_slices", "window_of", "window_positions"]

Sizes: TypeAlias = "list[int] | ir.Value"
"""Spatial sizes: known numbers, or an int64 vector."""


@dataclasses.dataclass(frozen=True)
class Window:
    """How a kernel moves over an image; one entry per spatial dimension."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @property
    def taps(self) -> int:
        """Number of elements of the kernel."""
        return math.prod(self.kernel)

    @property
    def reach(self) -> list[int]:
        """How far the last element of the kernel lies from the first."""
        return [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]

    def attributes(self) -> dict[str, Any]:
        """Attributes of the ONNX convolution operators."""
        return {
            "kernel_shape": self.kernel,
            "strides": self.stride,
            "pads": [*self.padding, *self.padding],
            "dilations": self.dilation,
        }


def spread(values: Sequence[Any], n: int) -> list[int]:
    """One number per spatial dimension, from torch's list of ``n`` or of a single one."""
    values = list(values) * n if len(values) == 1 else list(values)
    if not all(isinstance(v, int) for v in values):
        raise NotLowered("a window of dynamic size, stride, padding or dilation")
    return values


def window_of(weight: fx.Node, stride: Sequence[Any], padding: Sequence[Any], dilation: Sequence[Any]) -> Window:
    """Geometry of a convolution with ``weight``."""
    n, kernel = rank_of(weight) - 2, shape_of(weight)[2:]
    return Window(spread(kernel, n), spread(stride, n), spread(padding, n), spread(dilation, n))


def image_sizes(g: GraphBuilder, node: fx.Node, spatial: int) -> Sizes:
    """The last ``spatial`` sizes of ``node``."""
    sizes = shape_of(node)[-spatial:]
    if all(isinstance(s, int) for s in sizes):
        return [int(s) for s in sizes]
    return g.op("Shape", g.value(node), start=rank_of(node) - spatial)


def window_positions(g: GraphBuilder, sizes: Sizes, window: Window) -> Sizes:
    """How many places the window finds in an image of ``sizes``."""
    growth = [2 * p - r - 1 for p, r in zip(window.padding, window.reach, strict=True)]
    if isinstance(sizes, list):
        return [(n + more) // s + 1 for n, more, s in zip(sizes, growth, window.stride, strict=True)]
    steps = g.op("Div", g.op("Add", sizes, g.ints(growth)), g.ints(window.stride))
    return g.op("Add", steps, g.ints([1]))


def tap_slices(g: GraphBuilder, image: ir.Value, first: int, window: Window, positions: Sizes) -> list[ir.Value]:
    """For each element of the kernel, the pixels it meets when the window takes all its ``positions``.

    ``first`` is the first spatial dimension of ``image``, which is padded here.
    """
    axes = g.ints(range(first, first + window.rank))
    if any(window.padding):
        image = g.pad(image, 2 + window.rank, first, window.padding, window.padding)
    if not isinstance(positions, list):
        last = g.op("Mul", g.op("Sub", positions, g.ints([1])), g.ints(window.stride))
        length = g.op("Add", last, g.ints([1]))
    slices = []
    for tap in itertools.product(*(range(k) for k in window.kernel)):
        starts = [t * d for t, d in zip(tap, window.dilation, strict=True)]
        if isinstance(positions, list):
            ends = g.ints([a + (n - 1) * s + 1 for a, n, s in zip(starts, positions, window.stride, strict=True)])
        else:
            ends = g.op("Add", length, g.ints(starts))
        slices.append(g.op("Slice", image, g.ints(starts), ends, axes, g.ints(window.stride)))
    return slices


def concatenated(g: GraphBuilder, values: Sequence[ir.Value], axis: int) -> ir.Value:
    return values[0] if len(values) == 1 else g.op("Concat", *values, axis=axis)
