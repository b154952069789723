"""Memory for the results of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.sizes import Sizes
from lightning_ort.runtime.memory import TensorPool

__all__ = ["Allocator", "allocator", "pooled_allocator"]

Allocator = Callable[[Sequence[Any]], list[torch.Tensor]]


def allocator(nodes: Sequence[fx.Node], sizes: Sizes, device: torch.device) -> Allocator:
    """Function from the inputs of a run to fresh contiguous tensors for ``nodes``."""
    parts = [(sizes.evaluator(n.meta["val"].shape), n.meta["val"].dtype) for n in nodes]
    empty = torch.empty

    def allocate(inputs: Sequence[Any]) -> list[torch.Tensor]:
        return [empty(size(inputs), dtype=dtype, device=device) for size, dtype in parts]

    return allocate


def pooled_allocator(nodes: Sequence[fx.Node], device: torch.device) -> Allocator | None:
    """Like :func:`allocator`, from a pool; ``None`` when sizes or types do not allow it."""
    vals = [n.meta["val"] for n in nodes]
    if not vals or len({v.dtype for v in vals}) > 1 or not all(isinstance(size, int) for v in vals for size in v.shape):
        return None
    pool = TensorPool([v.shape for v in vals], vals[0].dtype, device)
    return lambda inputs: pool.take()
