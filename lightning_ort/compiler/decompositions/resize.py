"""Interpolation: the nearest pixel repeated, all else as products with constant matrices, one per dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_ort.compiler.decompositions.registry import composes, keeps_if_native

aten = torch.ops.aten

Weights = Callable[[int, int, Any], np.ndarray]
"""(input size, output size, scale factor or None) to the matrix (output size, input size)."""


def _ratio(size: int, out: int, scale: float | None) -> float:
    return 1 / scale if scale is not None and scale > 0 else size / out


_INCONSISTENT = "torch's gradient of an interpolation by factors that leave the size is not that of what it gives"


def _nearest(size: int, out: int, scale: float | None, offset: float) -> list[int]:
    """Which pixel each pixel of the result repeats."""
    # torch computes these positions in single precision
    ratio = np.float32(_ratio(size, out, scale))
    source = np.floor((np.arange(out, dtype=np.float32) + np.float32(offset)) * ratio).astype(np.int64)
    return [int(i) for i in np.minimum(source, size - 1)]


def _repeated(x: Tensor, sizes: Sequence[Any], scales: Sequence[float | None], offset: float) -> Any:
    spatial = len(sizes)
    if not all(isinstance(s, int) for s in (*x.shape[-spatial:], *sizes)):
        return NotImplemented
    same = [size == out for size, out in zip(x.shape[-spatial:], sizes, strict=True)]
    on_cpu = x.device.type == "cpu" and not offset
    stays = on_cpu and spatial == 2
    if on_cpu and spatial != 2 and any(s and f not in (None, 1) for s, f in zip(same, scales, strict=True)):
        raise NotImplementedError(_INCONSISTENT)
    for d, out, scale in zip(range(x.dim() - spatial, x.dim()), sizes, scales, strict=True):
        size = int(x.shape[d])
        if stays and size == out:  # whatever the scale: so has torch's kernel
            continue
        source, times = _nearest(size, int(out), scale, offset), int(out) // size
        if source == [i for i in range(size) for _ in range(times)]:
            if times > 1:
                x = x.unsqueeze(d + 1).expand(*x.shape[: d + 1], times, *x.shape[d + 1 :]).flatten(d, d + 1)
        else:
            x = x.index_select(d, torch.tensor(source, device=x.device))
    return x


def _positions(size: int, out: int, scale: float | None, align_corners: bool) -> np.ndarray:
    if align_corners:
        return np.arange(out) * ((size - 1) / (out - 1) if out > 1 else 0.0)
    return (np.arange(out) + 0.5) * _ratio(size, out, scale) - 0.5


def _linear(align_corners: bool) -> Weights:
    def weights(size: int, out: int, scale: float | None) -> np.ndarray:
        position = np.maximum(_positions(size, out, scale, align_corners), 0)
        low = np.minimum(np.floor(position).astype(np.int64), size - 1)
        high = np.minimum(low + 1, size - 1)
        fraction = np.clip(position - low, 0, 1)[:, None]
        eye = np.eye(size)
        return (1 - fraction) * eye[low] + fraction * eye[high]

    return weights


def _cubic(align_corners: bool) -> Weights:
    def weights(size: int, out: int, scale: float | None) -> np.ndarray:
        position = _positions(size, out, scale, align_corners)
        base = np.floor(position).astype(np.int64)
        matrix, eye = np.zeros((out, size)), np.eye(size)
        for k in range(-1, 3):
            distance = np.abs(position - base - k)[:, None]
            matrix += _cubic_kernel(distance, -0.75) * eye[np.clip(base + k, 0, size - 1)]
        return matrix

    return weights


def _cubic_kernel(d: np.ndarray, a: float) -> np.ndarray:
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((d - 5) * d + 8) * d * a - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0))


def _smoothed(support: float, kernel: Callable[[np.ndarray], np.ndarray], align_corners: bool) -> Weights:
    """Antialiased interpolation: the kernel is widened by the factor by which the image shrinks."""

    def weights(size: int, out: int, scale: float | None) -> np.ndarray:
        if align_corners:
            ratio = (size - 1) / (out - 1) if out > 1 else 0.0
        else:
            ratio = _ratio(size, out, scale)
        width = max(ratio, 1.0)
        matrix = np.zeros((out, size))
        for i in range(out):
            center = ratio * (i + 0.5)
            first = max(int(center - support * width + 0.5), 0)
            last = min(int(center + support * width + 0.5), size)
            row = kernel((np.arange(first, last) - center + 0.5) / width)
            matrix[i, first:last] = row / row.sum()
        return matrix

    return weights


def _triangle(d: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(d), 0)


def along_each(x: Tensor, matrices: Sequence[np.ndarray | None]) -> Tensor:
    """Multiply each of the last dimensions of ``x`` by its matrix (output size, input size); ``None`` leaves it."""
    for i, matrix in enumerate(matrices):
        if matrix is None:
            continue
        dim = x.dim() - len(matrices) + i
        constant = torch.tensor(matrix.tolist(), dtype=x.dtype, device=x.device)
        if dim == x.dim() - 1:
            x = x @ constant.T
        elif dim == x.dim() - 2:
            x = constant @ x
        else:
            x = (constant @ x.flatten(dim + 1)).reshape(*x.shape[:dim], len(matrix), *x.shape[dim + 1 :])
    return x


def _resized(x: Tensor, sizes: Sequence[Any], scales: Sequence[float | None], weights: Weights, as_given: Any) -> Any:
    """``as_given``: see :func:`_register_aligned`."""
    spatial = len(sizes)
    if not all(isinstance(s, int) for s in (*x.shape[-spatial:], *sizes)) or not x.is_floating_point():
        return NotImplemented
    if x.device.type == "cpu":
        if as_given == "each":
            scales = [
                None if size == out else f for size, out, f in zip(x.shape[-spatial:], sizes, scales, strict=True)
            ]
        elif as_given and any(f not in (None, 1) for f in scales):
            if as_given == "never":
                return NotImplemented
            if [*x.shape[-spatial:]] == [*sizes]:
                raise NotImplementedError(_INCONSISTENT)
    return along_each(
        x,
        [
            None if size == out and scale in (None, 1) else weights(int(size), int(out), scale)
            for size, out, scale in zip(x.shape[-spatial:], sizes, scales, strict=True)
        ],
    )


def _sizes(x: Tensor, output_size: Sequence[Any] | None, factors: Sequence[float] | None) -> tuple[Any, Any]:
    """Output sizes and scale factors from the arguments of a ``vec`` overload."""
    if output_size is not None:
        return output_size, [None] * len(output_size)
    assert factors is not None
    factors = [float(f) for f in factors]  # one that changes is settled: what is between which pixels depends on it
    spatial = x.shape[2:]
    if not all(isinstance(s, int) for s in spatial):
        return list(spatial), factors
    return [math.floor(s * f) for s, f in zip(spatial, factors, strict=True)], factors


def _open_sizes(x: Tensor, output_size: Sequence[Any] | None, factors: Sequence[float] | None) -> tuple[Any, Any]:
    """The same where sizes are open."""
    sizes, scales = _sizes(x, output_size, factors)
    if output_size is None and not all(isinstance(s, int) for s in sizes):
        sizes = [torch.sym_int(s * f) for s, f in zip(sizes, scales, strict=True)]
    return sizes, scales


def _register_nearest(packet: Any, offset: float) -> None:
    keeps_if_native(packet, _open_sizes)

    @composes(packet.vec, as_read=True)
    def vec(x: Tensor, output_size: Any, scale_factors: Any) -> Any:
        return _repeated(x, *_sizes(x, output_size, scale_factors), offset)

    @composes(packet.default, as_read=True)
    def plain(x: Tensor, output_size: Any, *scales: float | None) -> Any:
        return _repeated(x, output_size, [*scales, *([None] * (len(output_size) - len(scales)))], offset)


def _register_aligned(packet: Any, make: Callable[[bool], Weights], as_given: str = "") -> None:
    """Register how ``packet`` interpolates.

    Args:
        packet: its overloads.
        make: makes the matrices, from whether corners are aligned.
        as_given: what torch's kernels on the CPU do with scale factors beside sizes (1.1 times few pixels are as many):
            pixels stay as they are along ``each`` dimension whose size stays; if ``all`` stay, they do
            so in the result or in its gradient, not in both; ``never`` are factors what decides alone.
    """
    keeps_if_native(packet, _open_sizes)

    @composes(packet.vec, as_read=True)
    def vec(x: Tensor, output_size: Any, align_corners: bool, scale_factors: Any) -> Any:
        return _resized(x, *_sizes(x, output_size, scale_factors), make(align_corners), as_given)

    @composes(packet.default, as_read=True)
    def plain(x: Tensor, output_size: Any, align_corners: bool, *scales: float | None) -> Any:
        scales = (*scales, *([None] * (len(output_size) - len(scales))))
        return _resized(x, output_size, scales, make(align_corners), as_given)


for _packet in (aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d):
    _register_nearest(_packet, 0.0)
for _packet in (aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d):
    _register_nearest(_packet, 0.5)
for _packet in (aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d):
    _register_aligned(_packet, _linear, "each")
_register_aligned(aten.upsample_bicubic2d, _cubic, "all")
_register_aligned(aten._upsample_bilinear2d_aa, lambda align: _smoothed(1.0, _triangle, align), "never")
_register_aligned(
    aten._upsample_bicubic2d_aa, lambda align: _smoothed(2.0, lambda d: _cubic_kernel(np.abs(d), -0.5), align), "never"
)
