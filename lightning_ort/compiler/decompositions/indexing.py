"""Reductions over elements that share an index, and writing at positions that do not count from the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lightning_ort.compiler.decompositions.registry import composes, decomposes, keeps, refuse_unless

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


keeps(aten.embedding.default, aten.embedding_dense_backward.default)

SUM, MEAN, MAX = range(3)


@composes(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Bag values, bag of each index, size of each bag, and for maxima the row that each value came from."""
    if sparse or scale_grad_by_freq or not weight.is_floating_point():
        return NotImplemented  # eager divides by the counts of other rows than it should: leave that to torch
    indices, offsets = indices.to(torch.int64), offsets.to(torch.int64)
    rows = F.embedding(indices, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    kept = indices != padding_idx if padding_idx >= 0 else None
    length = None if include_last_offset else _common_length(offsets, indices)
    if length is not None:
        return _equal_bags(rows, indices, kept, length, mode)
    _check(offsets, indices.shape[0], include_last_offset)
    return _bags(rows, indices, kept, offsets, offsets.shape[0] - include_last_offset, mode)


def _check(offsets: Tensor, count: Any, include_last_offset: bool) -> None:
    """Refuse offsets that eager refuses, or with which it reads memory that it never wrote."""
    end = torch.full_like(offsets[:1], count)
    bounds = torch.cat([torch.zeros_like(end), offsets, end])
    rises = bounds.diff()
    fits = (rises >= 0).all() & (rises[:1] == 0)
    if include_last_offset:
        fits = fits & (rises[-1:] == 0)
    last = "end with" if include_last_offset else "not exceed"
    refuse_unless(fits, f"the offsets of embedding bags must start with 0, rise, and {last} the number of indices")


def _common_length(offsets: Tensor, indices: Tensor) -> Any:
    """Length of all bags when the offsets are ``arange(0, n, length)``, as ``F.embedding_bag`` makes them in 2-D."""
    proxies = get_proxy_mode()
    if proxies is None:
        return None
    inner: Any = torch._from_functional_tensor(offsets.elem) if isinstance(offsets, FunctionalTensor) else offsets
    proxy = get_proxy_slot(inner, proxies.tracer, None, lambda found: found.proxy)
    node = getattr(proxy, "node", None)
    if node is None or node.target is not aten.arange.start_step or node.args[0] != 0 or len(node.args) < 3:
        return None
    step = node.args[2]
    length = step if isinstance(step, int) else step.meta["val"]
    return length if statically_known_true(offsets.shape[0] * length == indices.shape[0]) else None


def _equal_bags(rows: Tensor, indices: Tensor, kept: Tensor | None, length: Any, mode: int) -> tuple[Tensor, ...]:
    bags = indices.shape[0] // length
    bag_of = torch.arange(bags, device=rows.device).unsqueeze(1).expand(bags, length).reshape(-1)
    grid = rows.reshape(bags, length, rows.shape[1])
    sizes = torch.full((bags,), length, dtype=torch.int64, device=rows.device)
    if kept is not None:
        kept = kept.reshape(bags, length)
        sizes = kept.sum(1)
        kept = kept.unsqueeze(2)
    if mode == MAX:
        best = (grid if kept is None else grid.masked_fill(~kept, -torch.inf)).argmax(1)
        values = grid.gather(1, best.unsqueeze(1)).squeeze(1)
        if kept is not None:
            values = values.masked_fill((sizes == 0).unsqueeze(1), 0)
        return values, bag_of, sizes, indices.reshape(bags, length).gather(1, best)
    total = (grid if kept is None else grid.masked_fill(~kept, 0)).sum(1)
    if mode == MEAN:
        total = total / (length if kept is None else sizes.clamp(min=1).to(rows.dtype).unsqueeze(1))
    return total, bag_of, sizes, sizes


def _bags(
    rows: Tensor, indices: Tensor, kept: Tensor | None, offsets: Tensor, bags: Any, mode: int
) -> tuple[Tensor, ...]:
    count, width = rows.shape
    starts = torch.zeros(count + 1, dtype=torch.int64, device=rows.device)
    bag_of = starts.scatter_add(0, offsets, torch.ones_like(offsets)).cumsum(0).narrow(0, 0, count) - 1
    ones = torch.ones_like(indices) if kept is None else kept.to(torch.int64)
    sizes = torch.zeros(bags, dtype=torch.int64, device=rows.device).scatter_add(0, bag_of, ones)
    target = bag_of.unsqueeze(1).expand(count, width)
    if mode == MAX:
        return _first_maxima(rows, indices, kept, bag_of, target, sizes)
    if kept is not None:
        rows = rows.masked_fill(~kept.unsqueeze(1), 0)
    total = torch.zeros(bags, width, dtype=rows.dtype, device=rows.device).scatter_add(0, target, rows)
    if mode == MEAN:
        total = total / sizes.clamp(min=1).to(rows.dtype).unsqueeze(1)
    return total, bag_of, sizes, sizes


def _first_maxima(
    rows: Tensor, indices: Tensor, kept: Tensor | None, bag_of: Tensor, target: Tensor, sizes: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The largest value of each bag and column, taken from its first occurrence as eager does."""
    count, width = rows.shape
    shown = rows.detach() if kept is None else rows.detach().masked_fill(~kept.unsqueeze(1), -torch.inf)
    lowest = torch.full((sizes.shape[0], width), -torch.inf, dtype=rows.dtype, device=rows.device)
    largest = lowest.scatter_reduce(0, target, shown, "amax")
    place = torch.arange(count, device=rows.device).unsqueeze(1).expand(count, width)
    place = place.masked_fill(shown < largest.gather(0, target), count)
    first = torch.full((sizes.shape[0], width), count, dtype=torch.int64, device=rows.device)
    first = first.scatter_reduce(0, target, place, "amin").clamp(max=count - 1)
    empty = (sizes == 0).unsqueeze(1)
    values = rows.gather(0, first).masked_fill(empty, 0)
    return values, bag_of, sizes, indices[first].masked_fill(empty, 0)
