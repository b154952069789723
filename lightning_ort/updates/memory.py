"""How tensors lie in memory, and whether they overlap."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from torch import Tensor

__all__ = ["Spans", "flat", "memory_order"]


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The order of dimensions in which ``tensor`` is contiguous (channels last, transposed), if it is not so by itself.

    ``None`` where it is, and where no order makes it so.
    """
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(len(strides)), key=lambda d: -strides[d]))
    return order if tensor.permute(order).is_contiguous() else None


def flat(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor | None:
    """All elements in one dimension, as they lie in memory; ``None`` if that is not the order of dimensions given."""
    ordered = tensor.detach() if order is None else tensor.detach().permute(order)
    return ordered.view(-1) if ordered.is_contiguous() else None


class Spans:
    """The memory of some tensors.

    Args:
        tensors: contiguous, in whatever order of dimensions.

    Attributes:
        overlap: whether any two of them have memory in common.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors if t.numel())
        self._starts, self._ends = [a for a, _ in spans], [b for _, b in spans]
        self.overlap = any(end > start for end, start in zip(self._ends, self._starts[1:], strict=False))

    def touch(self, tensor: Tensor) -> bool:
        """Whether contiguous ``tensor`` has memory in common with any of them."""
        start = tensor.data_ptr()
        k = bisect.bisect_left(self._starts, start + tensor.numel() * tensor.element_size())
        return k > 0 and self._ends[k - 1] > start
