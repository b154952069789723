"""Embedding bags as sums over the rows of a table."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lightning_ort.compiler.decompositions.checks import refuse_unless
from lightning_ort.compiler.decompositions.composites import composes
from lightning_ort.compiler.decompositions.registry import keeps

aten = torch.ops.aten

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
    if proxies is None or not isinstance(offsets, FunctionalTensor):
        return None
    inner = torch._from_functional_tensor(offsets.elem)
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
