"""Gradients of padding, and the sum of overlapping windows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ort.compiler.decompositions.registry import composes, decomposes, keeps

aten = torch.ops.aten

keeps(
    aten.constant_pad_nd.default,
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
    aten.im2col.default,
)


def _folded(grad: Tensor, dim: int, before: int, after: int, mirrored: bool) -> Tensor:
    """Gradient before padding along ``dim``: what lies in the padding returns to where it was copied from."""
    padded = grad.shape[dim]
    size = padded - before - after
    inner = grad.narrow(dim, before, size)
    # strips that overlap are added one by one, and so are those of which that depends on an open size
    if not isinstance(size, int) or (mirrored and before + after + 2 > size):
        if before:
            strip = grad.narrow(dim, 0, before)
            strip = strip.flip(dim) if mirrored else strip.sum(dim, keepdim=True)
            inner = inner + _placed(strip, dim, 1 if mirrored else 0, size)
        if after:
            strip = grad.narrow(dim, padded - after, after)
            strip = strip.flip(dim) if mirrored else strip.sum(dim, keepdim=True)
            inner = inner + _placed(strip, dim, size - 1 - (after if mirrored else 0), size)
        return inner
    left = right = None
    first, last = 0, size
    if before:
        left = grad.narrow(dim, 0, before)
        first = before + 1 if mirrored else 1
        if mirrored:
            left = torch.cat([inner.narrow(dim, 0, 1), inner.narrow(dim, 1, before) + left.flip(dim)], dim)
        else:
            left = inner.narrow(dim, 0, 1) + left.sum(dim, keepdim=True)
    if after:
        right = grad.narrow(dim, padded - after, after)
        last = size - (after + 1 if mirrored else 1)
        if mirrored:
            right = torch.cat([inner.narrow(dim, last, after) + right.flip(dim), inner.narrow(dim, size - 1, 1)], dim)
        else:
            right = inner.narrow(dim, last, 1) + right.sum(dim, keepdim=True)
    if not mirrored and last < first:  # a single element, next to both borders
        assert left is not None and right is not None
        return left + right - inner
    pieces = [p for p in (left, inner.narrow(dim, first, last - first), right) if p is not None]
    return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0]


def _placed(strip: Tensor, dim: int, start: int, size: int) -> Tensor:
    dim %= strip.dim()
    pad = [0, 0] * (strip.dim() - 1 - dim) + [start, size - start - strip.shape[dim]]
    return aten.constant_pad_nd(strip, pad, 0.0)


def _unpadded(grad: Tensor, padding: Sequence[int], mirrored: bool) -> Tensor:
    if not all(isinstance(p, int) and p >= 0 for p in padding):
        return NotImplemented
    for i in range(len(padding) // 2):
        before, after = padding[2 * i], padding[2 * i + 1]
        if before or after:
            grad = _folded(grad, grad.dim() - 1 - i, before, after, mirrored)
    return grad


@decomposes(
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d_backward.default,
)
def reflection_pad_backward(grad: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    return _unpadded(grad, padding, mirrored=True)


@decomposes(
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)
def replication_pad_backward(grad: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    return _unpadded(grad, padding, mirrored=False)


@composes(aten._pad_circular.default)
def pad_circular(x: Tensor, pad: Sequence[int]) -> Tensor:
    if not all(isinstance(p, int) and p >= 0 for p in pad):
        return NotImplemented
    for i in range(len(pad) // 2):
        dim, before, after = x.dim() - 1 - i, pad[2 * i], pad[2 * i + 1]
        size = x.shape[dim]
        pieces = [x.narrow(dim, size - before, before), x, x.narrow(dim, 0, after)]
        if before or after:
            x = torch.cat([p for p, n in zip(pieces, (before, 1, after), strict=True) if n], dim)
    return x


@decomposes(aten.col2im.default)
def col2im(
    columns: Tensor,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    """Windows side by side are moved; others are added by a transposed convolution, a channel per window element."""
    if not all(isinstance(s, int) for s in output_size):
        return NotImplemented
    batched = columns if columns.dim() == 3 else columns.unsqueeze(0)
    area = kernel_size[0] * kernel_size[1]
    channels = batched.shape[1] // area
    places = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, d, p, s in zip(output_size, kernel_size, dilation, padding, stride, strict=True)
    ]
    extra = [
        size - ((o - 1) * s - 2 * p + d * (k - 1) + 1)
        for size, o, k, d, p, s in zip(output_size, places, kernel_size, dilation, padding, stride, strict=True)
    ]
    if list(stride) == list(kernel_size) and list(dilation) == [1, 1] and not any(padding):
        grid = batched.reshape(-1, channels, *kernel_size, *places).permute(0, 1, 4, 2, 5, 3)
        image = grid.reshape(-1, channels, *(k * n for k, n in zip(kernel_size, places, strict=True)))
        image = aten.constant_pad_nd(image, [0, extra[1], 0, extra[0]]) if any(extra) else image
        return image if columns.dim() == 3 else image.squeeze(0)
    eye = torch.eye(area, dtype=columns.dtype, device=columns.device).reshape(area, 1, *kernel_size)
    kernel = eye.repeat(channels, 1, 1, 1)
    grid = batched.reshape(-1, channels * area, *places)
    image = aten.convolution(grid, kernel, None, stride, padding, dilation, True, extra, channels)
    return image if columns.dim() == 3 else image.squeeze(0)
