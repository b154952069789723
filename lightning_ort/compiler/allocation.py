"""Memory for the results of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.symbolic_shapes import Sizes
from lightning_ort.runtime.memory import TensorPool

__all__ = ["allocator", "kept_buffers", "place_of", "pooled_allocator"]

_SMALL = 16  # entries

Allocator = Callable[[Sequence[Any]], list[torch.Tensor]]


def place_of(val: torch.Tensor, device: torch.device) -> torch.device:
    """Where the tensor that ``val`` stands for lives in a region on ``device``: there, or on the CPU."""
    return val.device if val.device.type == "cpu" else device


def allocator(nodes: Sequence[fx.Node], sizes: Sizes, device: torch.device) -> Allocator:
    """Function from the inputs of a run to fresh contiguous tensors for ``nodes``."""
    vals = [n.meta["val"] for n in nodes]
    parts = [(sizes.evaluator(v.shape), v.dtype, place_of(v, device)) for v in vals]
    empty = torch.empty

    def allocate(inputs: Sequence[Any]) -> list[torch.Tensor]:
        return [empty(size(inputs), dtype=dtype, device=place) for size, dtype, place in parts]

    return allocate


def kept_buffers(nodes: Sequence[fx.Node], device: torch.device) -> dict[int, torch.Tensor]:
    """Number of a node to memory that may stay the same from run to run, for those of few entries.

    Copying them out takes less time than binding the memory of a new tensor.
    """
    shapes = {i: n.meta["val"].shape for i, n in enumerate(nodes)}
    fixed = {i: tuple(s) for i, s in shapes.items() if all(isinstance(size, int) for size in s)}
    return {
        i: torch.empty(shape, dtype=nodes[i].meta["val"].dtype, device=place_of(nodes[i].meta["val"], device))
        for i, shape in fixed.items()
        if math.prod(shape) <= _SMALL
    }


def pooled_allocator(nodes: Sequence[fx.Node], device: torch.device) -> Allocator | None:
    """Like :func:`allocator`, from a pool; ``None`` when sizes or types do not allow it."""
    vals = [n.meta["val"] for n in nodes]
    if len({(v.dtype, place_of(v, device)) for v in vals}) != 1 or not all(
        isinstance(size, int) for v in vals for size in v.shape
    ):
        return None
    pool = TensorPool([v.shape for v in vals], vals[0].dtype, place_of(vals[0], device))
    return lambda inputs: pool.take()
