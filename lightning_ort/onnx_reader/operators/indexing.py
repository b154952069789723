"""Reading elements by index."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ort.onnx_reader.registry import operator

__all__: list[str] = []


def from_start(indices: Tensor, length: int) -> Tensor:
    """Indices that may count from the end, as int64 counted from the start."""
    indices = indices.long()
    return torch.where(indices < 0, indices + length, indices)


@operator("Gather")
def gather(data: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    axis = axis % data.dim()
    if indices.dim() == 0:
        return data.index_select(axis, from_start(indices, data.shape[axis]).reshape(1)).squeeze(axis)
    index = from_start(indices, data.shape[axis])
    if axis == 0 and data.dim() == 2:
        return torch.nn.functional.embedding(index, data)
    return data[(slice(None),) * axis + (index,)]


@operator("GatherElements")
def gather_elements(data: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    return torch.gather(data, axis, from_start(indices, data.shape[axis]))


@operator("GatherND")
def gather_nd(data: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    return data[nd_index(data, indices, batch_dims)]


def nd_index(data: Tensor, indices: Tensor, batch_dims: int = 0) -> tuple[Tensor, ...]:
    """The index tuples in the last dimension of ``indices``, as one tensor per indexed dimension of ``data``."""
    found = []
    for d in range(batch_dims):
        steps = torch.arange(data.shape[d], device=data.device)
        found.append(steps.reshape([-1 if i == d else 1 for i in range(indices.dim() - 1)]))
    for k in range(indices.shape[-1]):
        found.append(from_start(indices[..., k], data.shape[batch_dims + k]))
    return tuple(found)


@operator("Compress")
def compress(x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    if axis is None:
        x, axis = x.reshape(-1), 0
    chosen = condition.nonzero().squeeze(1)
    return x.index_select(axis, chosen)


@operator("NonZero")
def nonzero(x: Tensor) -> Tensor:
    return x.nonzero().t()
