"""Tensors that lie in one piece of memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["Packed"]

_ALIGNMENT = 16  # entries; each tensor starts on a cache line of its own


class Packed:
    """Zeros of the shapes and types of ``like``, those of one type in one piece, so that one operator reaches them.

    Attributes:
        flat: element type to the piece; what lies between the tensors is zero.
        views: name to tensor, a view of a piece.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        starts: dict[str, int] = {}
        sizes: dict[torch.dtype, int] = {}
        for name, tensor in like.items():
            starts[name] = sizes.get(tensor.dtype, 0)
            sizes[tensor.dtype] = starts[name] + -(-max(tensor.numel(), 1) // _ALIGNMENT) * _ALIGNMENT
        self.flat = {dtype: torch.zeros(size, dtype=dtype) for dtype, size in sizes.items()}
        self.views = {
            name: self.flat[t.dtype][starts[name] : starts[name] + t.numel()].view(t.shape) for name, t in like.items()
        }

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Copy ``values`` into the tensors of their names."""
        for name, value in values.items():
            self.views[name].copy_(value)
