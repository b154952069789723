"""Reductions over elements that share an index."""

from __future__ import annotations

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
    shape = [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
    return x.scatter_reduce(dim, index.view(shape).expand_as(source), source, reduce, include_self=include_self)
