"""Sorting and choosing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ort.onnx_reader.registry import operator

__all__: list[str] = []


@operator("TopK", sizes=["k"])
def topk(
    x: Tensor, k: Any, *, axis: int = -1, largest: int = 1, sorted: int = 1, n_outputs: int
) -> Tensor | tuple[Tensor, Tensor]:
    count = k[0] if isinstance(k, (list, tuple)) else k
    # of equal elements the first one counts; torch.topk takes any
    values, indices = torch.sort(x, stable=True, dim=axis, descending=bool(largest))
    values = values.narrow(axis, 0, count)
    return (values, indices.narrow(axis, 0, count)) if n_outputs == 2 else values
