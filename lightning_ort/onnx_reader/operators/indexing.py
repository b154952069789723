"""Reading elements by index."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ort.errors import UnsupportedError
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


@operator("LabelEncoder", domain="ai.onnx.ml")
def label_encoder(
    x: Tensor,
    *,
    keys_int64s: list[int] | None = None,
    keys_floats: list[float] | None = None,
    values_int64s: list[int] | None = None,
    values_floats: list[float] | None = None,
    default_int64: int = -1,
    default_float: float = 0.0,
    default_string: str = "",
) -> Tensor:
    keys, values = keys_int64s or keys_floats, values_int64s or values_floats
    if keys is None or values is None:
        raise ValueError("keys and values must be numbers: there are no tensors of strings")
    whole = values_int64s is not None
    default, dtype = (default_int64, torch.int64) if whole else (default_float, torch.float32)
    found = torch.full_like(x, default, dtype=dtype)
    # the first of equal keys counts
    for key, value in reversed(list(zip(keys, values, strict=True))):
        found = torch.where(x.isnan() if key != key else x == key, value, found)
    return found


_REDUCE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@operator("ScatterElements")
def scatter_elements(
    data: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none"
) -> Tensor:
    index = from_start(indices, data.shape[axis])
    if reduction == "none":
        return torch.scatter(data, axis, index, updates)
    if reduction == "add":
        return torch.scatter_add(data, axis, index, updates)
    return torch.scatter_reduce(data, axis, index, updates, _REDUCE[reduction], include_self=True)


@operator("ScatterND")
def scatter_nd(data: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    if reduction not in ("none", "add"):
        raise UnsupportedError(f"ScatterND: reduction {reduction!r} cannot be read; 'none' and 'add' can.")
    return torch.index_put(data, nd_index(data, indices), updates, accumulate=reduction == "add")
