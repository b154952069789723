"""Sampling an image at given points: grid_sample as gathers, affine_grid as a product."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ort.compiler.decompositions.registry import composes

aten = torch.ops.aten

BILINEAR, NEAREST, BICUBIC = range(3)
ZEROS, BORDER, REFLECTION = range(3)


def _clipped(x: Tensor, size: Any) -> Tensor:
    """Coordinate moved into the image, what is none to its corner; as in eager, without a gradient on its border."""
    inside = (x > 0) & (x < size - 1)
    return torch.where(inside, x, torch.where(x > 0, x.detach(), 0).clamp(0, size - 1))


def _reflected(x: Tensor, size: Any, align_corners: bool) -> Tensor:
    low, span = (0.0, size - 1) if align_corners else (-0.5, size)
    if span == 0:
        return x * 0
    x = x - low
    x = torch.where(x < 0, -x, x)
    flips = (x.detach() / span).floor()
    rest = x - flips * span
    back = torch.where(torch.remainder(flips, 2) > 0, span - rest, rest)
    return back + low


def _padded(x: Tensor, size: Any, padding_mode: int, align_corners: bool) -> Tensor:
    if padding_mode == ZEROS:
        return x
    if padding_mode == REFLECTION:
        x = _reflected(x, size, align_corners)
    return _clipped(x, size)


class _Unmoved(torch.autograd.Function):
    """The result as it is; the points that it depends on in steps alone get zeros for a gradient, as in eager."""

    @staticmethod
    def forward(context: Any, result: Tensor, points: Tensor) -> Tensor:
        context.save_for_backward(points)
        return result.clone()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Any:
        return grad, torch.zeros_like(context.saved_tensors[0])


class _Image:
    """An image whose pixels are looked up by number, zero outside."""

    def __init__(self, x: Tensor) -> None:
        self.batch, self.channels, *self.sizes = x.shape
        self.flat = x.reshape(self.batch, self.channels, -1)

    def at(self, coordinates: Sequence[Tensor], bounded: bool) -> Tensor:
        """Pixels (batch, channels, points) at whole coordinates (batch, points), one tensor per dimension."""
        index: Any = 0
        visible = None
        for c, size in zip(coordinates, self.sizes, strict=True):
            if not bounded:
                inside = (c >= 0) & (c <= size - 1)
                visible = inside if visible is None else visible & inside
                c = c.clamp(0, size - 1)
            # a pixel for a point that is nowhere: its weight is NaN
            index = index * size + torch.where(c == c, c, 0).to(torch.int64)
        pixels = self.flat.gather(2, index.unsqueeze(1).expand(self.batch, self.channels, index.shape[1]))
        return pixels if visible is None else pixels * visible.to(pixels.dtype).unsqueeze(1)


def _sample(x: Tensor, grid: Tensor, mode: int, padding_mode: int, align_corners: bool) -> Any:
    sizes, out = x.shape[2:], grid.shape[1:-1]
    if any(isinstance(s, int) and s == 0 for s in x.shape):
        return NotImplemented
    points = grid.reshape(grid.shape[0], -1, grid.shape[-1])
    places = []  # the grid counts dimensions from the last
    for i, size in enumerate(sizes):
        p = points[..., len(sizes) - 1 - i]
        places.append((p + 1) * ((size - 1) / 2) if align_corners else ((p + 1) * size - 1) / 2)
    image, bounded = _Image(x), padding_mode != ZEROS
    if mode == BICUBIC:
        result = _bicubic(image, places, padding_mode, align_corners)
    else:
        places = [_padded(p, s, padding_mode, align_corners) for p, s in zip(places, sizes, strict=True)]
        if mode == NEAREST:
            result = _Unmoved.apply(image.at([p.detach().round() for p in places], bounded), grid)
        else:
            result = _linear(image, places)
    return result.reshape(x.shape[0], x.shape[1], *out)


def _linear(image: _Image, places: Sequence[Tensor]) -> Tensor:
    lows = [p.detach().floor() for p in places]
    fractions = [p - low for p, low in zip(places, lows, strict=True)]
    result = None
    for corner in itertools.product((0, 1), repeat=len(places)):
        weight = None
        for bit, f in zip(corner, fractions, strict=True):
            factor = f if bit else 1 - f
            weight = factor if weight is None else weight * factor
        assert weight is not None
        pixels = image.at([low + bit for low, bit in zip(lows, corner, strict=True)], bounded=False)
        part = pixels * weight.unsqueeze(1)
        result = part if result is None else result + part
    assert result is not None
    return result


def _cubic_weights(t: Tensor) -> list[Tensor]:
    a = -0.75

    def near(d: Tensor) -> Tensor:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: Tensor) -> Tensor:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _bicubic(image: _Image, places: Sequence[Tensor], padding_mode: int, align_corners: bool) -> Tensor:
    lows = [p.detach().floor() for p in places]
    weights = [_cubic_weights(p - low) for p, low in zip(places, lows, strict=True)]
    result = None
    for offsets in itertools.product(range(4), repeat=2):
        at = [
            _padded(low + (offset - 1), size, padding_mode, align_corners)
            for low, offset, size in zip(lows, offsets, image.sizes, strict=True)
        ]
        pixels = image.at(at, padding_mode != ZEROS)
        part = pixels * (weights[0][offsets[0]] * weights[1][offsets[1]]).unsqueeze(1)
        result = part if result is None else result + part
    assert result is not None
    return result


@composes(aten.grid_sampler_2d.default)
def grid_sampler_2d(x: Tensor, grid: Tensor, mode: int, padding_mode: int, align_corners: bool) -> Any:
    return _sample(x, grid, mode, padding_mode, align_corners)


@composes(aten.grid_sampler_3d.default)
def grid_sampler_3d(x: Tensor, grid: Tensor, mode: int, padding_mode: int, align_corners: bool) -> Any:
    return _sample(x, grid, mode, padding_mode, align_corners)


# torch's kernel calls a product, which autocast casts; that it does is unknown to torch's trace
@composes(aten.affine_grid_generator.default, native=True, casting=True)
def affine_grid_generator(theta: Tensor, size: Sequence[Any], align_corners: bool) -> Any:
    axes = []
    for n in size[2:]:
        steps = torch.arange(n, dtype=theta.dtype, device=theta.device)
        if align_corners:
            axes.append(steps * (2 / (n - 1)) - 1 if n > 1 else steps)
        else:
            axes.append((steps * 2 + 1) / n - 1)
    shape = list(size[2:])
    base: list[Tensor] = []
    for i, axis in enumerate(axes):
        view = [1] * len(shape)
        view[i] = shape[i]
        base.insert(0, axis.reshape(view).expand(shape).reshape(-1))
    points = torch.stack([*base, torch.ones_like(base[0])], 1)
    return points.expand(size[0], *points.shape).bmm(theta.transpose(1, 2)).reshape(size[0], *shape, len(shape))
