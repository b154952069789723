"""Gradients of average pooling as products with constant matrices; adaptive maxima as maxima over equal windows."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_ort.compiler import custom_ops
from lightning_ort.compiler.decompositions.registry import composes, decomposes, keeps, tells
from lightning_ort.compiler.decompositions.resize import along_each

aten = torch.ops.aten

keeps(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)


@composes(aten.max_pool1d.default, native=True)
def max_pool1d(x: Tensor, *options: Any) -> Tensor:
    """With the indices that autograd asks for; torch's kernel that makes none settles an open length."""
    return aten.max_pool1d_with_indices.default(x, *options)[0]


tells(aten.max_pool1d.default)(lambda pool, *args: max_pool1d(*args))


def _spread(values: Sequence[int], n: int) -> list[int]:
    return list(values) * n if len(values) == 1 else list(values)


def _max_pool_backward(spatial: int) -> Any:
    """Windows that do not overlap need no indices, whose computation takes ONNX Runtime longer than all the rest."""

    def backward(
        grad: Tensor,
        x: Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        ceil_mode: bool,
        indices: Tensor,
    ) -> Any:
        kernel = _spread(kernel_size, spatial)
        disjoint = (not stride or _spread(stride, spatial) == kernel) and not any(padding) and not ceil_mode
        if not disjoint or any(d != 1 for d in dilation) or x.dim() != spatial + 2 or math.prod(kernel) > 64:
            return NotImplemented
        return custom_ops.max_pool_backward(grad, x, kernel)

    return backward


decomposes(aten.max_pool2d_with_indices_backward.default)(_max_pool_backward(2))
decomposes(aten.max_pool3d_with_indices_backward.default)(_max_pool_backward(3))


@functools.cache
def _windows(size: int, kernel: int, stride: int, padding: int, ceil_mode: bool, count_padding: bool,
             uniform: bool) -> np.ndarray:  # fmt: skip
    """Matrix (positions, size) of the averages; ``uniform`` gives every pixel the weight 1 instead."""
    reach = size + 2 * padding - kernel
    positions = (-(-reach // stride) if ceil_mode else reach // stride) + 1
    if ceil_mode and (positions - 1) * stride >= size + padding:
        positions -= 1  # the last window must start inside the image or its left padding
    matrix = np.zeros((positions, size))
    for i in range(positions):
        start = i * stride - padding
        end = min(start + kernel, size + padding)
        covered = slice(max(start, 0), min(end, size))
        count = end - start if count_padding else covered.stop - covered.start
        matrix[i, covered] = 1 if uniform else 1 / count
    return matrix


def _average_backward(spatial: int) -> Any:
    def backward(
        grad: Tensor,
        x: Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Any:
        sizes = x.shape[-spatial:]
        if not all(isinstance(s, int) for s in sizes) or not x.is_floating_point():
            return NotImplemented
        kernel = _spread(kernel_size, spatial)
        strides = _spread(stride, spatial) if stride else kernel
        pads = _spread(padding, spatial)
        if (
            kernel == strides
            and not any(pads)
            and grad.shape[-spatial:] == tuple(int(n) // k for n, k in zip(sizes, kernel, strict=True))
        ):
            return _handed_back(grad / (divisor_override or math.prod(kernel)), sizes, kernel)
        matrices = [
            _windows(int(n), k, s, p, ceil_mode, count_include_pad, divisor_override is not None).T
            for n, k, s, p in zip(sizes, kernel, strides, pads, strict=True)
        ]
        if divisor_override is not None:
            matrices[0] = matrices[0] / divisor_override
        return along_each(grad, matrices)

    return backward


def _handed_back(share: Tensor, sizes: Sequence[Any], kernel: Sequence[int]) -> Tensor:
    """``share`` for each pixel of windows that lie side by side, 0 for those behind the last one."""
    spatial = len(kernel)
    for d, k in enumerate(kernel, share.dim() - spatial):
        share = share.unsqueeze(d + 1).expand(*share.shape[: d + 1], k, *share.shape[d + 1 :]).flatten(d, d + 1)
    rest = [int(n) - int(m) for n, m in zip(sizes, share.shape[-spatial:], strict=True)]
    return aten.constant_pad_nd(share, [p for r in reversed(rest) for p in (0, r)], 0.0) if any(rest) else share


decomposes(aten.avg_pool2d_backward.default)(_average_backward(2))
decomposes(aten.avg_pool3d_backward.default)(_average_backward(3))


def _cells(size: int, out: int) -> list[tuple[int, int]]:
    """Start and end of what each output of adaptive pooling covers."""
    return [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]


def _adaptive_averages(x: Tensor, output_size: Sequence[Any], spatial: int) -> Any:
    sizes = x.shape[-spatial:]
    if all(o == 1 for o in output_size):
        return x.mean(list(range(-spatial, 0)), keepdim=True)
    if not all(isinstance(s, int) for s in (*sizes, *output_size)):
        return NotImplemented
    if all(int(n) % int(o) == 0 for n, o in zip(sizes, output_size, strict=True)):
        pool = aten.avg_pool2d if spatial == 2 else aten.avg_pool3d
        return pool(x, [int(n) // int(o) for n, o in zip(sizes, output_size, strict=True)])
    matrices = []
    for n, o in zip(sizes, output_size, strict=True):
        matrix = np.zeros((int(o), int(n)))
        for i, (start, end) in enumerate(_cells(int(n), int(o))):
            matrix[i, start:end] = 1 / (end - start)
        matrices.append(matrix)
    return along_each(x, matrices)


@composes(aten._adaptive_avg_pool2d.default, as_read=True)
def adaptive_avg_pool2d(x: Tensor, output_size: Sequence[Any]) -> Any:
    return _adaptive_averages(x, output_size, 2)


@composes(aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool3d(x: Tensor, output_size: Sequence[Any]) -> Any:
    return _adaptive_averages(x, output_size, 3)


def _adaptive_maxima(x: Tensor, output_size: Sequence[Any], spatial: int) -> Any:
    """Lay the windows side by side, short ones filled up with their last pixel, and pool the larger image."""
    sizes = x.shape[-spatial:]
    if not all(isinstance(s, int) for s in (*sizes, *output_size)):
        return NotImplemented
    kernel, sources = [], []
    for n, o in zip(sizes, output_size, strict=True):
        cells = _cells(int(n), int(o))
        width = max(end - start for start, end in cells)
        kernel.append(width)
        sources.append([min(start + k, end - 1) for start, end in cells for k in range(width)])
    laid = x.detach()
    for i, source in enumerate(sources):
        dim = x.dim() - spatial + i
        if source != list(range(int(x.shape[dim]))):
            laid = laid.index_select(dim, torch.tensor(source, device=x.device))
    pool = aten.max_pool2d_with_indices if spatial == 2 else aten.max_pool3d_with_indices
    _, places = pool(laid, kernel, kernel)
    index = torch.zeros_like(places)
    below = math.prod(len(source) for source in sources)
    for size, source in zip(sizes, sources, strict=True):
        below //= len(source)
        coordinate = torch.div(places, below, rounding_mode="floor") % len(source)
        if source != list(range(int(size))):
            coordinate = torch.tensor(source, device=x.device)[coordinate]
        index = index * int(size) + coordinate
    lead = x.dim() - spatial
    values = x.flatten(lead).gather(lead, index.flatten(lead)).reshape(index.shape)
    return values, index


@composes(aten.adaptive_max_pool2d.default, as_read=True)
def adaptive_max_pool2d(x: Tensor, output_size: Sequence[Any]) -> Any:
    return _adaptive_maxima(x, output_size, 2)


@composes(aten.adaptive_max_pool3d.default)
def adaptive_max_pool3d(x: Tensor, output_size: Sequence[Any]) -> Any:
    return _adaptive_maxima(x, output_size, 3)


def _window_starts(samples: Tensor, size: Any, window: int, outputs: int) -> Tensor:
    """Where the windows of a fractional pooling begin in one dimension: (batch, channels, outputs).

    They are ``(size - window) / (outputs - 1)`` apart, rounded down after a shift by the random ``samples`` (batch,
    channels); the last one ends where the input does.
    """
    number = torch.arange(outputs, device=samples.device)
    last = torch.full_like(number, 1) * (size - window)
    if outputs == 1:
        return last.expand(*samples.shape, 1)
    apart = (size - window) / (outputs - 1)
    samples = samples.unsqueeze(-1)
    starts = ((number.to(samples.dtype) + samples) * apart).to(torch.int64) - (samples * apart).to(torch.int64)
    return torch.where(number == outputs - 1, last, starts)


def _fractional_max_pool(dims: Sequence[int]) -> Any:
    """``dims``: which of the samples of a channel belongs to each spatial dimension."""

    def pool(x: Tensor, kernel_size: Sequence[int], output_size: Sequence[int], samples: Tensor) -> Any:
        n = len(dims)
        kernel, outputs = _spread(kernel_size, n), _spread(output_size, n)
        if any(isinstance(size, int) and size == 0 for size in x.shape):
            return NotImplemented
        batched = x if x.dim() == n + 2 else x.unsqueeze(0)
        lead, sizes = batched.shape[:2], batched.shape[2:]
        index: Any = 0
        for d, size in enumerate(sizes):
            starts = _window_starts(samples[..., dims[d]], size, kernel[d], outputs[d])
            places = starts.unsqueeze(-1) + torch.arange(kernel[d], device=x.device)
            # the dimensions of all outputs, and then those of a window
            form = [outputs[d] if e == d else 1 for e in range(n)] + [kernel[d] if e == d else 1 for e in range(n)]
            index = index * size + places.reshape(*samples.shape[:2], *form)
        index = index.expand(*lead, *outputs, *kernel).reshape(*lead, -1)
        entries = batched.reshape(*lead, -1).gather(2, index).reshape(*lead, *outputs, -1)
        largest, which = entries.max(-1)
        position = index.reshape(entries.shape).gather(-1, which.unsqueeze(-1)).squeeze(-1)
        shape = [*x.shape[: x.dim() - n], *outputs]
        return largest.reshape(shape), position.reshape(shape)

    return pool


composes(aten.fractional_max_pool2d.default)(_fractional_max_pool([1, 0]))
composes(aten.fractional_max_pool3d.default)(_fractional_max_pool([0, 1, 2]))
