"""Random numbers; torch's generator draws them, so ``seed`` attributes have no effect."""

from __future__ import annotations

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
