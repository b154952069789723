"""Shapes and everything that only moves elements."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ort.errors import UnsupportedError
from lightning_ort.onnx_reader.registry import operator

__all__: list[str] = []

Ints = Any
"""a list of sizes, which may be symbolic"""


@operator("Shape")
def shape(x: Tensor, *, start: int = 0, end: int | None = None) -> list[Any]:
    return list(x.shape)[start:end]


@operator("Size")
def size(x: Tensor) -> Any:
    return x.numel()


@operator("Reshape", sizes=["shape"])
def reshape(x: Tensor, shape: Ints, *, allowzero: int = 0) -> Tensor:
    if not allowzero:
        shape = [x.shape[i] if isinstance(s, int) and s == 0 else s for i, s in enumerate(shape)]
    return x.reshape(shape)


@operator("Flatten")
def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    axis = axis + x.dim() if axis < 0 else axis
    rows = 1
    for s in x.shape[:axis]:
        rows = rows * s
    columns = 1
    for s in x.shape[axis:]:
        columns = columns * s
    return x.reshape(rows, columns)


@operator("Transpose")
def transpose(x: Tensor, *, perm: list[int] | None = None) -> Tensor:
    return x.permute(perm if perm is not None else list(range(x.dim()))[::-1])


@operator("Squeeze", sizes=["axes"])
def squeeze(x: Tensor, axes: Ints = None) -> Tensor:
    if axes is None:
        return torch.squeeze(x)
    return torch.squeeze(x, [axes] if isinstance(axes, int) else list(axes))


@operator("Unsqueeze", sizes=["axes"])
def unsqueeze(x: Tensor, axes: Ints) -> Tensor:
    axes = [axes] if isinstance(axes, int) else axes
    rank = x.dim() + len(axes)
    for axis in sorted(a % rank for a in axes):
        x = x.unsqueeze(axis)
    return x


@operator("Expand", sizes=["shape"])
def expand(x: Tensor, shape: Ints) -> Tensor:
    """Broadcast in both directions: a size of 1 in ``shape`` keeps that of ``x``."""
    rank = max(len(shape), x.dim())
    own = [1] * (rank - x.dim()) + list(x.shape)
    wanted = [1] * (rank - len(shape)) + list(shape)
    return x.expand([o if isinstance(w, int) and w == 1 else w for o, w in zip(own, wanted, strict=True)])


@operator("Tile", sizes=["repeats"])
def tile(x: Tensor, repeats: Ints) -> Tensor:
    return x.repeat(list(repeats))


@operator("Concat")
def concat(*tensors: Tensor, axis: int) -> Tensor:
    return torch.cat(tensors, axis)


@operator("Split", sizes=["split"])
def split(
    x: Tensor, split: Ints = None, *, axis: int = 0, num_outputs: int | None = None, n_outputs: int
) -> Tensor | tuple[Tensor, ...]:
    if split is None:
        parts = num_outputs or n_outputs
        length = x.shape[axis]
        chunk = -(-length // parts)
        split = [chunk] * (parts - 1)
        split.append(length - chunk * (parts - 1))
    pieces = torch.split(x, list(split), axis)
    return pieces[0] if n_outputs == 1 else pieces


_FAR = 2**31 - 1
"""bounds beyond this mean the end of the axis"""


@operator("Slice", sizes=["starts", "ends", "axes", "steps"])
def slice_(x: Tensor, starts: Ints, ends: Ints, axes: Ints = None, steps: Ints = None) -> Tensor:
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        x = _sliced(x, start, end, axis % x.dim(), step)
    return x


def _sliced(x: Tensor, start: Any, end: Any, axis: int, step: int) -> Tensor:
    if step > 0:
        end = None if isinstance(end, int) and end >= _FAR else end
        index = [slice(None)] * axis + [slice(start, end, step)]
        return x[tuple(index)]
    # backwards: position p of the axis is length - 1 - p of the flipped one
    first = 0 if isinstance(start, int) and (start >= _FAR or start == -1) else _flipped(start, x.shape[axis])
    stop = None if isinstance(end, int) and end <= -_FAR else _flipped(end, x.shape[axis], past=1)
    index = [slice(None)] * axis + [slice(first, stop, -step)]
    return x.flip(axis)[tuple(index)]


def _flipped(position: Any, length: Any, past: int = 0) -> Any:
    """Where ``position`` is counted from the other end; beyond an end it is that end, or ``past`` the last element."""
    if position < 0:
        return torch.sym_min(-1 - position, length - 1 + past)
    return torch.sym_max(length - 1 - position, 0)


@operator("Pad", sizes=["pads", "axes"], constants=["value"])
def pad(x: Tensor, pads: Ints, value: Tensor | None = None, axes: Ints = None, *, mode: str = "constant") -> Tensor:
    axes = list(range(x.dim())) if axes is None else [a % x.dim() for a in axes]
    count = len(axes)
    amounts: list[Any] = [0] * (2 * x.dim())
    for i, axis in enumerate(axes):
        place = 2 * (x.dim() - 1 - axis)
        amounts[place], amounts[place + 1] = pads[i], pads[count + i]
    if mode == "constant":
        return _filled(x, amounts, value)
    kinds = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    if mode not in kinds:
        raise UnsupportedError(f"Pad: mode {mode!r} cannot be read; constant, reflect, edge and wrap can.")
    return _mirrored(x, amounts, kinds[mode])


def _mirrored(x: Tensor, amounts: list[Any], kind: str) -> Tensor:
    """``x`` padded with elements of its own."""
    while len(amounts) >= 2 and all(isinstance(a, int) and a == 0 for a in amounts[-2:]):
        amounts = amounts[:-2]
    if not amounts:
        return x
    # torch pads the last one to three dimensions of tensors that have one or two more
    dims = len(amounts) // 2
    if dims > 3:
        x = _mirrored(x, amounts[:6], kind)
        return _mirrored(x.movedim((-3, -2, -1), (0, 1, 2)), amounts[6:], kind).movedim((0, 1, 2), (-3, -2, -1))
    if any(isinstance(a, int) and a < 0 for a in amounts):  # what is cut off is not repeated either
        x = F.pad(x, [min(a, 0) if isinstance(a, int) else 0 for a in amounts])
        return _mirrored(x, [max(a, 0) if isinstance(a, int) else a for a in amounts], kind)
    shape = x.shape
    folded = x.reshape(1, -1, *shape[x.dim() - dims :])
    padded = F.pad(folded, amounts, mode=kind)
    return padded.reshape(*shape[: x.dim() - dims], *padded.shape[2:])


def _filled(x: Tensor, amounts: list[Any], value: Tensor | None) -> Tensor:
    if value is None:
        return F.pad(x, amounts)
    if isinstance(value, Tensor):
        # the fill is a constant nearly always; as a tensor it is put in by a mask
        inside = F.pad(torch.ones_like(x, dtype=torch.bool), amounts)
        return torch.where(inside, F.pad(x, amounts), value.reshape(()))
    return F.pad(x, amounts, value=value)


@operator("DepthToSpace")
def depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    b, c, h, w = x.shape
    parts = x.reshape(b, blocksize, blocksize, c // blocksize**2, h, w)
    return parts.permute(0, 3, 4, 1, 5, 2).reshape(b, c // blocksize**2, h * blocksize, w * blocksize)


@operator("SpaceToDepth")
def space_to_depth(x: Tensor, *, blocksize: int) -> Tensor:
    b, c, h, w = x.shape
    parts = x.reshape(b, c, h // blocksize, blocksize, w // blocksize, blocksize)
    return parts.permute(0, 3, 5, 1, 2, 4).reshape(b, c * blocksize**2, h // blocksize, w // blocksize)


@operator("Trilu", sizes=["k"])
def trilu(x: Tensor, k: Any = 0, *, upper: int = 1) -> Tensor:
    diagonal = k[0] if isinstance(k, (list, tuple)) else (k or 0)
    return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)


@operator("ReverseSequence")
def reverse_sequence(x: Tensor, sequence_lens: Tensor, *, batch_axis: int = 1, time_axis: int = 0) -> Tensor:
    moved = x.movedim((batch_axis, time_axis), (0, 1))
    steps = torch.arange(moved.shape[1], device=x.device)
    lengths = sequence_lens.unsqueeze(1)
    order = torch.where(steps < lengths, lengths - 1 - steps, steps)
    index = order.reshape(*order.shape, *[1] * (moved.dim() - 2)).expand(moved.shape)
    return moved.gather(1, index).movedim((0, 1), (batch_axis, time_axis))


@operator("SequenceConstruct")
def sequence_construct(*tensors: Tensor) -> list[Tensor]:
    return list(tensors)


@operator("SequenceEmpty")
def sequence_empty(*, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return []


@operator("SequenceInsert", sizes=["position"])
def sequence_insert(sequence: list[Tensor], tensor: Tensor, position: int | None = None) -> list[Tensor]:
    at = len(sequence) if position is None else position
    return [*sequence[:at], tensor, *sequence[at:]]


@operator("SequenceErase", sizes=["position"])
def sequence_erase(sequence: list[Tensor], position: int = -1) -> list[Tensor]:
    at = position % len(sequence)
    return [*sequence[:at], *sequence[at + 1 :]]


@operator("SequenceAt", sizes=["position"])
def sequence_at(sequence: list[Tensor], position: int) -> Tensor:
    return sequence[position]


@operator("SequenceLength")
def sequence_length(sequence: list[Tensor]) -> Tensor:
    return torch.tensor(len(sequence))


@operator("SplitToSequence", sizes=["split"])
def split_to_sequence(x: Tensor, split: Any = None, *, axis: int = 0, keepdims: int = 1) -> list[Tensor]:
    if split is None:
        return list(x.split(1, axis)) if keepdims else list(x.unbind(axis))
    return list(torch.split(x, split if isinstance(split, int) else list(split), axis))


@operator("ConcatFromSequence")
def concat_from_sequence(sequence: list[Tensor], *, axis: int, new_axis: int = 0) -> Tensor:
    return torch.stack(sequence, axis) if new_axis else torch.cat(sequence, axis)
