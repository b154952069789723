"""Resizing."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ort.errors import UnsupportedError
from lightning_ort.onnx_reader.registry import operator

__all__: list[str] = []


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
    """One axis after the other; torch's own interpolation where it computes the same."""
    if coordinate_transformation_mode == "tf_crop_and_resize" or keep_aspect_ratio_policy != "stretch":
        raise UnsupportedError("Resize: crops and kept aspect ratios cannot be read")
    axes = list(range(x.dim())) if axes is None else [a % x.dim() for a in axes]
    factors = list(scales) if scales else None
    lengths = list(sizes) if sizes else [_scaled(x.shape[a], s) for a, s in zip(axes, factors or [], strict=True)]
    if factors is None:
        factors = [None] * len(axes)
    plan = [(a, n, f) for a, n, f in zip(axes, lengths, factors, strict=True) if not _same(x.shape[a], n, f)]
    if not plan:
        return x
    result = _by_torch(x, plan, mode, coordinate_transformation_mode, nearest_mode, cubic_coeff_a, antialias)
    if result is not None:
        return result
    if antialias or exclude_outside:
        raise UnsupportedError("Resize: antialias and exclude_outside in this combination cannot be read")
    for axis, length, factor in plan:
        positions = _positions(x.shape[axis], length, factor, coordinate_transformation_mode, x)
        if mode == "nearest":
            x = x.index_select(axis, _nearest(positions, nearest_mode).clamp(0, x.shape[axis] - 1).long())
        else:
            x = _interpolated(x, axis, positions, mode, cubic_coeff_a)
    return x


def _scaled(length: Any, factor: Any) -> Any:
    return length * factor if isinstance(factor, int) else math.floor(length * factor)


def _same(length: Any, wanted: Any, factor: Any) -> bool:
    if factor is not None:
        return isinstance(factor, int) and factor == 1
    return bool(length == wanted)


def _by_torch(
    x: Tensor,
    plan: list[tuple[int, Any, Any]],
    mode: str,
    coordinates: str,
    nearest_mode: str,
    a: float,
    antialias: int,
) -> Tensor | None:
    """``None`` where torch has no such interpolation."""
    spatial = list(range(2, x.dim()))
    if not spatial or any(axis not in spatial for axis, _, _ in plan):
        return None
    rank = len(spatial)
    half = coordinates == "half_pixel" or (coordinates == "pytorch_half_pixel" and all(n > 1 for _, n, _ in plan))
    kinds = {("linear", 1): "linear", ("linear", 2): "bilinear", ("linear", 3): "trilinear", ("cubic", 2): "bicubic"}
    if mode == "nearest":
        if coordinates != "asymmetric" or nearest_mode != "floor" or rank > 3:
            return None
        kind = "nearest"
    elif (half or coordinates == "align_corners") and (mode, rank) in kinds and (mode == "linear" or a == -0.75):
        kind = kinds[mode, rank]
    else:
        return None
    lengths, factors = list(x.shape[2:]), [1.0] * rank
    for axis, length, factor in plan:
        lengths[axis - 2] = length
        factors[axis - 2] = factor
    corners = None if kind == "nearest" else coordinates == "align_corners"
    smooth = bool(antialias) and kind in ("bilinear", "bicubic")
    if antialias and not smooth:
        return None
    if all(f is not None for f in factors) and not corners:
        if not all(isinstance(f, (int, float)) for f in factors):
            return None
        return F.interpolate(x, None, [float(f) for f in factors], kind, corners, False, smooth)
    return F.interpolate(x, lengths, None, kind, corners, antialias=smooth)


def _positions(length: Any, wanted: Any, factor: Any, coordinates: str, x: Tensor) -> Tensor:
    """Where each element of the result lies on the axis it is read from."""
    scale = wanted / length if factor is None else factor
    target = torch.arange(wanted, device=x.device).to(x.dtype if x.is_floating_point() else torch.float32)
    if coordinates == "asymmetric":
        return target / scale
    if coordinates == "align_corners":
        return target * ((length - 1) / (wanted - 1)) if wanted > 1 else target * 0
    if coordinates == "pytorch_half_pixel" and wanted == 1:
        return target * 0
    if coordinates == "half_pixel_symmetric":
        adjustment = wanted / (scale * length)
        return length / 2 * (1 - adjustment) + (target + 0.5) / scale - 0.5
    if coordinates in ("half_pixel", "pytorch_half_pixel"):
        return (target + 0.5) / scale - 0.5
    raise UnsupportedError(f"Resize: coordinates {coordinates!r} cannot be read")


def _nearest(positions: Tensor, mode: str) -> Tensor:
    if mode == "floor":
        return positions.floor()
    if mode == "ceil":
        return positions.ceil()
    if mode == "round_prefer_ceil":
        return (positions + 0.5).floor()
    return (positions - 0.5).ceil()


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


def _cubic(d: Tensor, a: float) -> Tensor:
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return torch.where(d <= 1, near, torch.where(d < 2, far, torch.zeros_like(d)))
