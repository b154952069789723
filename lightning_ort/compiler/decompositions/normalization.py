"""Normalization layers: which stay whole until they are written as ONNX."""

from __future__ import annotations

import torch

from lightning_ort.compiler.decompositions.registry import keeps

aten = torch.ops.aten

keeps(
    aten.native_batch_norm_backward.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
)
