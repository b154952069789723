"""Writing elements by index."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ort.errors import UnsupportedError
from lightning_ort.onnx_reader.operators.indexing import from_start, nd_index
from lightning_ort.onnx_reader.registry import operator

__all__: list[str] = []

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
