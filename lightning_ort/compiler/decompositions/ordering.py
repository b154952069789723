"""Medians, and what runs along a dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lightning_ort.compiler.decompositions.registry import decomposes

aten = torch.ops.aten


def _has_nothing(x: Tensor) -> bool:
    """Whether torch has NaN for the median of x, which is an error along a dimension."""
    return x.is_floating_point() and any(isinstance(n, int) and n == 0 for n in x.shape)


@decomposes(aten.median.default)
def median_all(x: Tensor) -> Tensor:
    if _has_nothing(x):
        return x.new_full((), math.nan)
    return torch.median(x.reshape(-1), 0)[0]


@decomposes(aten.nanmedian.default)
def nanmedian_all(x: Tensor) -> Tensor:
    if _has_nothing(x):
        return x.new_full((), math.nan)
    return torch.nanmedian(x.reshape(-1), 0)[0]


def _shifted(x: Tensor, by: int, dim: int, fill: float) -> Tensor:
    """``x`` moved by that many places to the end of ``dim``, or to its beginning when negative."""
    pad = x.narrow(dim, 0, abs(by))
    pad = torch.full_like(pad, fill)
    kept = x.narrow(dim, max(-by, 0), x.shape[dim] - abs(by))
    return torch.cat([pad, kept] if by > 0 else [kept, pad], dim)


def _strides(n: int) -> Iterator[int]:
    stride = 1
    while stride < n:
        yield stride
        stride *= 2


def _is_scannable(x: Tensor, dim: int) -> bool:
    return x.dim() > 0 and isinstance(x.shape[dim], int)


@decomposes(aten.cumprod.default)
def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    x = x.to(dtype or (x.dtype if x.is_floating_point() else torch.int64))
    if x.dim() == 0:
        return x.clone()
    if not _is_scannable(x, dim):
        return NotImplemented
    for stride in _strides(x.shape[dim]):
        x = x * _shifted(x, stride, dim, 1)
    return x


@decomposes(aten.logcumsumexp.default)
def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    if x.dim() == 0:
        return x.clone()
    if not _is_scannable(x, dim):
        return NotImplemented
    for stride in _strides(x.shape[dim]):
        x = torch.logaddexp(x, _shifted(x, stride, dim, -math.inf))
    return x


def _running_extremum(
    x: Tensor, dim: int, stays: Callable[[Tensor, Tensor], Tensor], worst: float
) -> tuple[Tensor, Tensor]:
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    if not _is_scannable(x, dim):
        return NotImplemented
    dim = dim % x.dim()
    n = x.shape[dim]
    index = torch.arange(n, device=x.device).view([-1 if d == dim else 1 for d in range(x.dim())]).expand(x.shape)
    if not x.is_floating_point():
        limits = torch.iinfo(x.dtype)
        worst = limits.min if worst < 0 else limits.max
    for stride in _strides(n):
        before, index_before = _shifted(x, stride, dim, worst), _shifted(index, stride, dim, 0)
        # The later one of equals is kept; a NaN stays and is passed on.
        kept = stays(x, before) | (x != x)
        if x.is_floating_point():
            kept = kept & ((before == before) | (x != x))
        x, index = torch.where(kept, x, before), torch.where(kept, index, index_before)
    return x, index


@decomposes(aten.cummax.default)
def cummax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _running_extremum(x, dim, torch.ge, -math.inf)


@decomposes(aten.cummin.default)
def cummin(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _running_extremum(x, dim, torch.le, math.inf)
