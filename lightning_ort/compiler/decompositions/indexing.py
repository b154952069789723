"""Reductions over elements that share an index, and writing at positions that do not count from the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ort.compiler.decompositions.registry import decomposes

aten = torch.ops.aten


def _identity(dtype: torch.dtype, reduce: str) -> float:
    """The number that does not change the result of a reduction."""
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    if dtype.is_floating_point:
        return float("-inf" if reduce == "amax" else "inf")
    limits = torch.iinfo(dtype)
    return limits.min if reduce == "amax" else limits.max


@decomposes(aten.scatter_reduce.two)
def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    if include_self and reduce != "mean":
        return NotImplemented
    start = x if include_self else x.scatter(dim, index, _identity(x.dtype, reduce))
    result = start.scatter_reduce(dim, index, src, "sum" if reduce == "mean" else reduce)
    if reduce != "mean":
        return result
    ones = torch.ones_like(x)
    count = ones if include_self else ones.scatter(dim, index, 0)
    count = count.scatter_add(dim, index, torch.ones_like(src))
    return result / count if x.is_floating_point() else result.div(count, rounding_mode="floor")


@decomposes(aten.index_reduce.default)
def index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    return x.scatter_reduce(dim, _along(x, dim, index, source), source, reduce, include_self=include_self)


def _along(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """``index`` of positions along one dimension, once for each element of ``source``."""
    shape = [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
    return index.to(torch.int64).view(shape).expand_as(source)


# torch's own rewritings of these are assignments by index, which count from the end where the operators do not


@decomposes(aten.index_add.default)
def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    if x.dim() == 0:
        return index_add(x.view(1), 0, index.view(1), source.view(1), alpha=alpha).view(())
    source = source if alpha == 1 else source * alpha
    return x.scatter_add(dim, _along(x, dim, index, source), source)


@decomposes(aten.index_copy.default)
def index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    if x.dim() == 0:
        return index_copy(x.view(1), 0, index.view(1), source.view(1)).view(())
    return x.scatter(dim, _along(x, dim, index, source), source)


@decomposes(aten.index_fill.int_Tensor)
def index_fill(x: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
    """Unlike :func:`index_copy`, of which torch makes it, it counts from the end."""
    if x.dim() == 0:
        return index_fill(x.view(1), 0, index, value).view(())
    indices = [None] * (dim % x.dim()) + [index.to(torch.int64)]
    return aten.index_put(x, indices, value.to(x.dtype))


@decomposes(aten.index_fill.int_Scalar)
def index_fill_scalar(x: Tensor, dim: int, index: Tensor, value: float) -> Tensor:
    return index_fill(x, dim, index, torch.full((), value, dtype=x.dtype, device=x.device))


@decomposes(aten.max_unpool2d.default)
def max_unpool2d(x: Tensor, indices: Tensor, output_size: Sequence[Any]) -> Tensor:
    return _unpooled(x, indices, output_size)


@decomposes(aten.max_unpool3d.default)
def max_unpool3d(
    x: Tensor, indices: Tensor, output_size: Sequence[Any], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    return _unpooled(x, indices, output_size)


def _unpooled(x: Tensor, indices: Tensor, sizes: Sequence[Any]) -> Tensor:
    """``x`` at the positions ``indices`` of planes (or volumes) of zeros."""
    lead = x.shape[: x.dim() - len(sizes)]
    zeros = torch.zeros(*lead, math.prod(sizes), dtype=x.dtype, device=x.device)
    return zeros.scatter(-1, indices.flatten(len(lead)), x.flatten(len(lead))).reshape(*lead, *sizes)
