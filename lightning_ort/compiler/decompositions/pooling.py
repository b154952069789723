"""Pooling: which operators stay whole until they are written as ONNX."""

from __future__ import annotations

import torch

from lightning_ort.compiler.decompositions.registry import keeps

aten = torch.ops.aten

keeps(
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
)
