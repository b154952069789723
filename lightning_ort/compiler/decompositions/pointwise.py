"""Operators that ONNX has, or whose lowering knows a better form than torch's rewriting."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_ort.compiler.decompositions.registry import decomposes, keeps

aten = torch.ops.aten

keeps(
    aten.threshold_backward.default,
    aten.clamp_min.default, aten.clamp_min.Tensor, aten.clamp_max.default, aten.clamp_max.Tensor,
    aten.logsumexp.default, aten.slice_backward.default, aten.select_backward.default,
    aten.tril.default, aten.triu.default, aten.roll.default,
    aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor,
)  # fmt: skip


@decomposes(aten.angle.default)
def angle(x: Tensor) -> Tensor:
    if x.is_complex():
        return NotImplemented
    x = x if x.is_floating_point() else x.to(torch.float32)
    return torch.where(x < 0, math.pi, torch.where(x != x, x, 0.0))
