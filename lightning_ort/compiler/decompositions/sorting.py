"""Medians and other ranks, by sorting."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ort.compiler.decompositions.registry import decomposes

aten = torch.ops.aten


def _ranked(x: Tensor, rank: int, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    """The value of that rank, 0 the smallest, and its position."""
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    values, index = torch.sort(x, dim)
    values, index = values.narrow(dim, rank, 1), index.narrow(dim, rank, 1)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


@decomposes(aten.kthvalue.default)
def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _ranked(x, k - 1, dim, keepdim)


@decomposes(aten.median.dim)
def median(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower one of two medians; NaN, sorted last, if there is one."""
    values, index = _ranked(x, (x.shape[dim] - 1) // 2 if x.dim() else 0, dim, keepdim)
    if x.is_floating_point() and x.dim():
        last, last_index = _ranked(x, x.shape[dim] - 1, dim, keepdim)
        spoilt = torch.isnan(last)
        values, index = torch.where(spoilt, last, values), torch.where(spoilt, last_index, index)
    return values, index


@decomposes(aten.median.default)
def median_all(x: Tensor) -> Tensor:
    return median(x.reshape(-1), 0)[0]


@decomposes(aten.nanmedian.dim)
def nanmedian(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The median of those that sorting puts before NaN."""
    if not x.is_floating_point() or x.dim() == 0:
        return median(x, dim, keepdim)
    values, index = torch.sort(x, dim)
    count = (x == x).sum(dim, keepdim=True)
    rank = ((count - 1) // 2).clamp(min=0)
    values, index = values.gather(dim, rank), index.gather(dim, rank)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


@decomposes(aten.nanmedian.default)
def nanmedian_all(x: Tensor) -> Tensor:
    return nanmedian(x.reshape(-1), 0)[0]
