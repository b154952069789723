"""Resizing."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_ort.errors import UnsupportedError
from lightning_ort.onnx_reader.registry import operator

__all__: list[str] = []

aten = torch.ops.aten


@operator("Resize", sizes=["roi", "scales", "sizes"])
def resize(
    x: Tensor,
    roi: Any = None,
    scales: Any = None,
    sizes: Any = None,
    *,
    antialias: int = 0,
    axes: list[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Tensor:
    """One axis after the other; torch's own interpolation where it computes the same.

    Positions are computed in float32, as ONNX Runtime does: which element is the nearest hangs on their last bit.
    """
    if coordinate_transformation_mode == "tf_crop_and_resize" or keep_aspect_ratio_policy != "stretch":
        raise UnsupportedError("Resize: crops and kept aspect ratios cannot be read")
    way = _Way(
        mode, coordinate_transformation_mode, nearest_mode, cubic_coeff_a, bool(antialias), bool(exclude_outside)
    )
    axes = list(range(x.dim())) if axes is None else [a % x.dim() for a in axes]
    factors = list(scales) if scales else None
    lengths = list(sizes) if sizes else [_scaled(x.shape[a], s) for a, s in zip(axes, factors or [], strict=True)]
    if factors is None:
        factors = [None] * len(axes)
    plan = [(a, n, f) for a, n, f in zip(axes, lengths, factors, strict=True) if not _same(x.shape[a], n, f)]
    # ONNX Runtime copies what keeps all its sizes, whatever the factors
    if all(isinstance(x.shape[a], int) and isinstance(n, int) and x.shape[a] == n for a, n, _ in plan):
        return x
    result = _by_torch(x, plan, way)
    if result is not None:
        return result
    for axis, length, factor in plan:
        x = _along(x, axis, length, factor, way)
    return x


@dataclasses.dataclass(frozen=True)
class _Way:
    """The attributes that say how elements are made."""

    mode: str
    coordinates: str
    nearest: str
    a: float
    antialias: bool
    exclude_outside: bool

    @property
    def is_plain(self) -> bool:
        return not (self.antialias or self.exclude_outside)


def _scaled(length: Any, factor: Any) -> Any:
    """The product is rounded to float32 before it is cut to a whole number."""
    if isinstance(factor, int):
        return length * factor
    if not isinstance(factor, float):
        return math.floor(length * factor)
    if isinstance(length, int):
        return int(np.float32(length) * np.float32(factor))
    # of a size that is open, by the fraction that float32 rounds
    simple = Fraction(factor).limit_denominator(1000)
    ratio = simple if np.float32(float(simple)) == np.float32(factor) else Fraction(factor)
    return length * ratio.numerator // ratio.denominator


def _same(length: Any, wanted: Any, factor: Any) -> bool:
    if factor is not None:
        return isinstance(factor, int) and factor == 1
    return bool(length == wanted)


_TORCH = {
    ("linear", 1): aten.upsample_linear1d, ("linear", 2): aten.upsample_bilinear2d,
    ("linear", 3): aten.upsample_trilinear3d, ("cubic", 2): aten.upsample_bicubic2d,
}  # fmt: skip


def _by_torch(x: Tensor, plan: list[tuple[int, Any, Any]], way: _Way) -> Tensor | None:
    """``None`` where torch has no such interpolation."""
    # its antialiasing leaves out what is outside, knows one coefficient, and repeats a row above a single column
    rank = x.dim() - 2
    if not way.is_plain or not x.is_floating_point() or (way.mode, rank) not in _TORCH:
        return None
    half = way.coordinates == "half_pixel"
    half = half or (way.coordinates == "pytorch_half_pixel" and all(n > 1 for _, n, _ in plan))
    if not (half or way.coordinates == "align_corners") or (way.mode == "cubic" and way.a != -0.75):
        return None
    if any(axis < 2 for axis, _, _ in plan):
        return None
    if rank != 2 and any(isinstance(n, torch.SymInt) for n in (*x.shape, *(n for _, n, _ in plan))):
        return None  # whose gradients take no open sizes
    lengths = list(x.shape[2:])
    factors: list[float | None] = [None] * rank
    for axis, length, factor in plan:
        if not (factor is None or isinstance(factor, (int, float))):
            return None
        if factor is not None and isinstance(x.shape[axis], int) and x.shape[axis] == length:
            return None  # torch copies such an axis
        lengths[axis - 2], factors[axis - 2] = length, None if factor is None else float(factor)
    # with both the sizes and the factors: torch would compute other sizes
    return _TORCH[way.mode, rank].default(x, lengths, way.coordinates == "align_corners", *factors)


def _along(x: Tensor, axis: int, wanted: Any, factor: Any, way: _Way) -> Tensor:
    """One axis resized."""
    length = x.shape[axis]
    if way.mode == "nearest" and not way.is_plain:
        raise UnsupportedError("Resize: antialias and exclude_outside of the nearest element cannot be read")
    if way.mode == "nearest" and isinstance(factor, int) and (way.coordinates, way.nearest) == ("asymmetric", "floor"):
        return _repeated(x, axis, factor)
    if isinstance(length, int) and isinstance(wanted, int) and isinstance(factor, (int, float, type(None))):
        positions = _positions(length, wanted, factor, way.coordinates)
        if way.mode == "nearest":
            index = np.clip(_nearest(positions, way.nearest), 0, length - 1).astype(np.int64).tolist()
            if index == [i for i in range(length) for _ in range(wanted // length)]:
                return _repeated(x, axis, wanted // length)
            return x.index_select(axis, torch.tensor(index, device=x.device))
        matrix = _matrix(length, wanted, factor, positions, way)
        constant = torch.tensor(matrix.tolist(), dtype=x.dtype, device=x.device)
        return torch.matmul(x.movedim(axis, -1), constant.T).movedim(-1, axis)
    if not way.is_plain:
        raise UnsupportedError(
            "Resize: antialias and exclude_outside can be read for fixed sizes only; declare the sizes of the input "
            "and of the result as numbers"
        )
    target = torch.arange(wanted, device=x.device).to(x.dtype if x.is_floating_point() else torch.float32)
    open_positions = _source(target, length, wanted, factor, way.coordinates)
    if way.mode == "nearest":
        return x.index_select(axis, _nearest(open_positions, way.nearest).clamp(0, length - 1).long())
    return _interpolated(x, axis, open_positions, way.mode, way.a)


def _repeated(x: Tensor, axis: int, times: int) -> Tensor:
    if times == 1:
        return x
    shape = x.shape
    return x.unsqueeze(axis + 1).expand(*shape[: axis + 1], times, *shape[axis + 1 :]).flatten(axis, axis + 1)


def _source(target: Any, length: Any, wanted: Any, factor: Any, coordinates: str) -> Any:
    """Where the elements of the result numbered ``target`` lie on the axis it is read from."""
    scale = wanted / length if factor is None else factor
    if isinstance(target, np.ndarray):
        scale, length, wanted = np.float32(scale), np.float32(length), np.float32(wanted)
    if coordinates == "asymmetric":
        return target / scale
    if coordinates == "align_corners":
        return target * (length - 1) / (wanted - 1) if wanted > 1 else target * 0
    if coordinates == "pytorch_half_pixel" and wanted == 1:
        return target * 0
    if coordinates == "half_pixel_symmetric":
        return _symmetric(target, length, wanted, scale)
    if coordinates in ("half_pixel", "pytorch_half_pixel"):
        return (target + 0.5) / scale - 0.5
    raise UnsupportedError(f"Resize: coordinates {coordinates!r} cannot be read")


def _symmetric(target: Any, length: Any, wanted: Any, scale: Any) -> Any:
    """As ONNX Runtime does: the margin in float32, what is added to it in float64."""
    one: Any = torch.ones((), device=target.device) if isinstance(target, Tensor) else np.float32(1)
    length, wanted, scale = one * length, one * wanted, one * scale
    margin = length / (one + one) * (one - wanted / (scale * length))
    if isinstance(target, np.ndarray):
        return (margin + (target.astype(np.float64) + 0.5) / scale - 0.5).astype(np.float32)
    return (margin + (target.double() + 0.5) / scale - 0.5).float()


def _positions(length: int, wanted: int, factor: float | None, coordinates: str) -> np.ndarray:
    target = np.arange(wanted, dtype=np.float32)
    return np.asarray(_source(target, length, wanted, factor, coordinates), np.float32)


def _nearest(positions: Any, mode: str) -> Any:
    rounding = np if isinstance(positions, np.ndarray) else torch
    if isinstance(positions, np.ndarray):
        positions = positions.astype(np.float64)  # a half is added exactly
    if mode == "floor":
        return rounding.floor(positions)
    if mode == "ceil":
        return rounding.ceil(positions)
    if mode == "round_prefer_ceil":
        return rounding.floor(positions + 0.5)
    return rounding.ceil(positions - 0.5)


def _matrix(length: int, wanted: int, factor: float | None, positions: np.ndarray, way: _Way) -> np.ndarray:
    """What each element of the axis (column) gives to each of the result (row)."""
    one, half = np.float32(1), np.float32(0.5)
    scale = np.float32(wanted / length if factor is None else factor)
    # smoothing widens the kernel by the factor by which the axis shrinks
    width = max(one / scale, one) if way.antialias else one
    reach = np.float32(1 if way.mode == "linear" else 2) * width
    if not way.antialias and way.mode == "linear":
        positions = np.clip(positions, 0, np.float32(length - 1))
    if way.antialias:
        first = np.floor(positions + half - reach + half)
        last = np.floor(positions + half + reach + half)
    else:
        first = np.floor(positions) - (reach - 1)
        last = first + 2 * reach
    taps = first[:, None] + np.arange(int((last - first).max()))
    distance = np.abs(taps - positions[:, None].astype(np.float64)) / width
    weights = np.maximum(1 - distance, 0) if way.mode == "linear" else _cubic(distance, way.a)
    weights = np.where(taps < last[:, None], weights, 0)
    if way.exclude_outside:
        weights = np.where((taps >= 0) & (taps < length), weights, 0)
    matrix = np.zeros((wanted, length))
    rows = np.broadcast_to(np.arange(wanted)[:, None], taps.shape)
    np.add.at(matrix, (rows, np.clip(taps, 0, length - 1).astype(np.int64)), weights)
    return matrix / matrix.sum(1, keepdims=True)


def _interpolated(x: Tensor, axis: int, positions: Tensor, mode: str, a: float) -> Tensor:
    last = x.shape[axis] - 1
    start = positions.floor()
    t = positions - start
    if mode == "linear":
        taps = [(0, 1 - t), (1, t)]
    else:
        taps = [(k, _cubic((t - k).abs(), a)) for k in (-1, 0, 1, 2)]
    shape = [-1 if i == axis else 1 for i in range(x.dim())]
    total: Any = 0
    for offset, weight in taps:
        index = (start + offset).clamp(0, last).long()
        total = total + x.index_select(axis, index) * weight.to(x.dtype).reshape(shape)
    return total


def _cubic(d: Any, a: float) -> Any:
    """Weights of elements at the distances ``d``, a tensor or an array."""
    where = np.where if isinstance(d, np.ndarray) else torch.where
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return where(d <= 1, near, where(d < 2, far, 0.0 * d))
