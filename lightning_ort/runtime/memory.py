"""Memory for results that is used again once nobody holds it."""

from __future__ import annotations

import ctypes
import gc
import math
import sys
from collections.abc import Sequence

import torch

__all__ = ["TensorPool", "release_free_memory"]

_ALIGNMENT = 16  # entries; each tensor starts on a cache line of its own
_KEPT = 2  # the gradients of one step are still alive while the next ones are written


class TensorPool:
    """Hands out sets of tensors, each set cut from one piece of memory.

    A piece is handed out again only when no tensor refers to it any more, so results never change under anyone's
    hands; that it lies where it lay before spares binding it again.

    Args:
        shapes: of the tensors of one set.
        dtype: of all of them.
        device: where they live.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._parts: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
        self._size = 0
        for shape in shapes:
            strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
            self._parts.append((tuple(shape), strides, self._size))
            self._size += -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
        self._pieces: list[tuple[list[torch.Tensor], int, int]] = []

    def take(self) -> list[torch.Tensor]:
        """A set of uninitialized tensors that nothing else refers to."""
        # a third of the time that cutting them anew takes
        return [part.detach() for part in self._free_piece()]

    def _free_piece(self) -> list[torch.Tensor]:
        for parts, storage, idle in self._pieces:
            if _references(storage) == idle:
                return parts
        flat = torch.empty(self._size, dtype=self._dtype, device=self._device)
        parts = [flat.as_strided(shape, strides, offset) for shape, strides, offset in self._parts]
        storage = flat.untyped_storage()._cdata
        del flat
        if len(self._pieces) == _KEPT:
            del self._pieces[0]
        self._pieces.append((parts, storage, _references(storage)))
        return parts


def release_free_memory() -> None:
    """Give memory that compiling and checking used back to the system, where the C library can, and to the GPU.

    What torch's allocator keeps for itself on a GPU would be missing in ONNX Runtime's arena.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
        if trim is not None:
            trim(0)


def _references(storage: int) -> int:
    # There is no public count of the tensors that share a storage; tests/test_memory.py fails if this one changes.
    return torch._C._storage_Use_Count(storage)
