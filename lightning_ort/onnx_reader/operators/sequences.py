"""Sequences of tensors, as Python lists."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ort.onnx_reader.registry import operator

__all__: list[str] = []


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
