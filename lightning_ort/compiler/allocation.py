"""Memory for the results of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from lightning_ort.compiler.symbolic_shapes import Sizes
from lightning_ort.runtime.memory import TensorPool

__all__ = ["allocator", "kept_buffers", "place_of", "pooled_allocator"]

_SMALL = 16  # entries
_LARGE = 1 << 17  # bytes
_LINE = 64  # bytes; kernels read whole cache lines

Allocator = Callable[[Sequence[Any]], list[torch.Tensor]]


def place_of(val: torch.Tensor, device: torch.device) -> torch.device:
    """Where the tensor that ``val`` stands for lives in a region on ``device``: there, or on the CPU."""
    return val.device if val.device.type == "cpu" else device


def allocator(
    nodes: Sequence[fx.Node], sizes: Sizes, device: torch.device, given_out: Collection[fx.Node] = ()
) -> Allocator:
    """Function from the inputs of a run to fresh contiguous tensors for ``nodes``.

    Args:
        nodes: what the tensors are for.
        sizes: those of ``nodes``.
        device: where they live, if it is not on the CPU.
        given_out: those whose tensors are handed to somebody, who may want to resize them.
    """
    parts = []
    for node in nodes:
        val = node.meta["val"]
        place = place_of(val, device)
        make = torch.empty if place.type != "cpu" or node in given_out else _empty
        parts.append((make, sizes.evaluator(val.shape), val.dtype, place))

    def allocate(inputs: Sequence[Any]) -> list[torch.Tensor]:
        return [make(size(inputs), dtype=dtype, device=place) for make, size, dtype, place in parts]

    return allocate


def _empty(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor on the CPU; a large one in memory that the C library can use again once it is free.

    torch asks for aligned memory. glibc cuts that out of a larger piece and gives the ends to whoever asks for so
    little next, so that what is freed is too small for the next tensor of that size: a heap of activations grows by a
    half within some steps. NumPy's memory is not aligned, and is asked for with room to align it here.
    """
    n_bytes = math.prod(size) * dtype.itemsize
    if n_bytes < _LARGE:
        return torch.empty(size, dtype=dtype, device=device)
    memory = torch.from_numpy(np.empty(n_bytes + _LINE, np.uint8))
    start = -memory.data_ptr() % _LINE
    return memory[start : start + n_bytes].view(dtype).view(size)


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
