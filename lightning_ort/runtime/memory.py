"""Memory for results that is used again once nobody holds it."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_ort.runtime.arena import release_arena
from lightning_ort.runtime.heap import trim, watch

__all__ = ["Packed", "TensorPool", "address_of", "release_free_memory", "storage_key"]

_ALIGNMENT = 16  # entries; each tensor starts on a cache line of its own
_KEPT = 2  # the gradients of one step are still alive while the next ones are written


def address_of(tensor: torch.Tensor) -> int:
    """Where the memory of ``tensor`` begins; for one without entries, where something else is that nobody reads.

    Such a tensor has no memory, and ONNX Runtime binds nothing without an address.
    """
    return tensor.data_ptr() or _somewhere(tensor.device).data_ptr()


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share a storage, while both are there.

    Private: torch compares storages by the address of what is behind them, which has no public name.
    """
    return tensor.untyped_storage()._cdata


@functools.cache
def _somewhere(device: torch.device) -> torch.Tensor:
    return torch.empty(_ALIGNMENT, device=device)


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
        self._pieces: list[_Piece] = []

    def take(self) -> list[torch.Tensor]:
        """A set of uninitialized tensors that nothing else refers to."""
        # a third of the time that cutting them anew takes
        return [part.detach() for part in self._free_piece()]

    def _free_piece(self) -> list[torch.Tensor]:
        for piece in self._pieces:
            if piece.state() == piece.idle:
                return piece.parts
        flat = torch.empty(self._size, dtype=self._dtype, device=self._device)
        piece = _Piece([flat.as_strided(*part) for part in self._parts], flat.untyped_storage())
        del flat
        piece.idle = piece.state()
        if len(self._pieces) == _KEPT:
            del self._pieces[0]
        self._pieces.append(piece)
        return piece.parts


class _Piece:
    """Tensors that share a storage, and what tells whether somebody else has the storage, or has done something to it.

    Attributes:
        parts: the tensors.
        idle: what :meth:`state` gives while nobody has.
    """

    __slots__ = ("_storage", "idle", "parts")

    def __init__(self, parts: list[torch.Tensor], storage: torch.UntypedStorage) -> None:
        self.parts, self._storage = parts, storage
        self.idle: tuple[int, int, int] | None = None

    def state(self) -> tuple[int, int, int]:
        """Tensors that refer to the storage, names that Python has for it, its address.

        There is no public count of the former; tests/compiler/test_memory.py fails if it changes. One object stands for
        the storage in Python, whoever asks for it. A storage that was resized or moved has another address.
        """
        storage = self._storage
        return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage), storage.data_ptr()


def release_free_memory() -> None:
    """Give memory that compiling and checking used back to the system, where the C library can, and to the GPU.

    What torch's allocator keeps for itself on a GPU would be missing in ONNX Runtime's arena, and what that keeps on
    the CPU would be missing in torch. No tensor waits for Python's garbage collector, which would look at all objects
    of the process for a third of a second.
    """
    release_arena()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    watch()
    trim()


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
