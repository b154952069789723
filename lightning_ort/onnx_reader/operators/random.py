"""Random numbers; torch's generator draws them, so ``seed`` attributes have no effect."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ort.onnx_reader.registry import operator

__all__: list[str] = []


@operator("RandomNormalLike", random=True)
def random_normal_like(
    x: Tensor, *, dtype: torch.dtype | None = None, mean: float = 0.0, scale: float = 1.0, seed: float | None = None
) -> Tensor:
    drawn = torch.randn_like(x, dtype=dtype)
    return drawn if (mean, scale) == (0, 1) else drawn * scale + mean


@operator("RandomUniformLike", random=True)
def random_uniform_like(
    x: Tensor, *, dtype: torch.dtype | None = None, high: float = 1.0, low: float = 0.0, seed: float | None = None
) -> Tensor:
    drawn = torch.rand_like(x, dtype=dtype)
    return drawn if (low, high) == (0, 1) else drawn * (high - low) + low


@operator("RandomNormal", random=True)
def random_normal(
    *,
    shape: list[int],
    dtype: torch.dtype = torch.float32,
    mean: float = 0.0,
    scale: float = 1.0,
    seed: float | None = None,
) -> Tensor:
    return torch.randn(shape, dtype=dtype) * scale + mean


@operator("RandomUniform", random=True)
def random_uniform(
    *,
    shape: list[int],
    dtype: torch.dtype = torch.float32,
    high: float = 1.0,
    low: float = 0.0,
    seed: float | None = None,
) -> Tensor:
    return torch.rand(shape, dtype=dtype) * (high - low) + low


@operator("Bernoulli", random=True)
def bernoulli(x: Tensor, *, dtype: torch.dtype | None = None, seed: float | None = None) -> Tensor:
    return (torch.rand_like(x) < x).to(x.dtype if dtype is None else dtype)


@operator("ConstantOfShape", sizes=["shape"])
def constant_of_shape(shape: Any, *, value: tuple[Any, torch.dtype] = (0.0, torch.float32)) -> Tensor:
    number, dtype = value
    return torch.full(list(shape), number, dtype=dtype)


@operator("Range", sizes=["start", "limit", "delta"])
def range_(start: Any, limit: Any, delta: Any, *, input_dtype: torch.dtype) -> Tensor:
    whole = all(isinstance(v, (int, torch.SymInt)) for v in (start, limit, delta))
    if whole:
        return torch.arange(start, limit, delta, dtype=torch.int64).to(input_dtype)
    return torch.arange(start, limit, delta, dtype=input_dtype)


@operator("EyeLike")
def eye_like(x: Tensor, *, dtype: torch.dtype | None = None, k: int = 0) -> Tensor:
    rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    columns = torch.arange(x.shape[1], device=x.device)
    return (columns - rows == k).to(x.dtype if dtype is None else dtype)


@operator("OneHot", sizes=["depth"], constants=["values"])
def one_hot(indices: Tensor, depth: Any, values: Tensor, *, axis: int = -1) -> Tensor:
    """Indices out of range give a row without the on-value."""
    count = depth[0] if isinstance(depth, (list, tuple)) else depth
    axis = axis % (indices.dim() + 1)
    whole = indices.long().unsqueeze(axis)
    steps = torch.arange(count, device=indices.device)
    steps = steps.reshape([-1 if i == axis else 1 for i in range(indices.dim() + 1)])
    return torch.where(torch.where(whole < 0, whole + count, whole) == steps, values[1], values[0])
