"""Normalization layers: which stay whole until they are written as ONNX, and re-parametrized weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ort.compiler.decompositions.registry import composes, decomposes, keeps

aten = torch.ops.aten

keeps(
    aten.native_batch_norm_backward.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten._fused_rms_norm.default,
    aten._fused_rms_norm_backward.default,
)


def _others(v: Tensor, dim: int) -> list[int]:
    return [d for d in range(v.dim()) if d != dim % v.dim()]


@decomposes(aten._weight_norm_interface.default)
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    norm = (v * v).sum(_others(v, dim), keepdim=True).sqrt()
    return v * (g / norm), norm


@decomposes(aten._weight_norm_interface_backward.default)
def weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norm: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    along = (grad * v).sum(_others(v, dim), keepdim=True) / norm
    return (grad - v * (along / norm)) * (g / norm), along


@composes(aten.rms_norm.default)
def rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Any:
    if not x.is_floating_point() or (weight is not None and weight.dtype != x.dtype):
        return NotImplemented
    return aten._fused_rms_norm(x, normalized_shape, weight, eps)[0]
