"""Memory for the results of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.sizes import Sizes
from lightning_ort.runtime.memory import TensorPool

__all__ = ["Allocator", "allocator", "kept_buffers", "pooled_allocator"]

_SMALL = 16  # entries

Allocator = Callable[[Sequence[Any]], list[torch.Tensor]]


def allocator(nodes: Sequence[fx.Node], sizes: Sizes, device: torch.device) -> Allocator:
    """Function from the inputs of a run to fresh contiguous tensors for ``nodes``."""
    parts = [(sizes.evaluator(n.meta["val"].shape), n.meta["val"].dtype) for n in nodes]
    empty = torch.empty

    def allocate(inputs: Sequence[Any]) -> list[torch.Tensor]:
        return [empty(size(inputs), dtype=dtype, device=device) for size, dtype in parts]

    return allocate


def kept_buffers(nodes: Sequence[fx.Node], device: torch.device) -> dict[int, torch.Tensor]:
    """Number of a node to memory that may stay the same from run to run, for those of few entries.

    Copying them out takes less time than binding the memory of a new tensor.
    """
    shapes = {i: n.meta["val"].shape for i, n in enumerate(nodes)}
    fixed = {i: tuple(s) for i, s in shapes.items() if all(isinstance(size, int) for size in s)}
    return {
        i: torch.empty(shape, dtype=nodes[i].meta["val"].dtype, device=device)
        for i, shape in fixed.items()
        if math.prod(shape) <= _SMALL
    }


def pooled_allocator(nodes: Sequence[fx.Node], device: torch.device) -> Allocator | None:
    """Like :func:`allocator`, from a pool; ``None`` when sizes or types do not allow it."""
    vals = [n.meta["val"] for n in nodes]
    if not vals or len({v.dtype for v in vals}) > 1 or not all(isinstance(size, int) for v in vals for size in v.shape):
        return None
    pool = TensorPool([v.shape for v in vals], vals[0].dtype, device)
    return lambda inputs: pool.take()
