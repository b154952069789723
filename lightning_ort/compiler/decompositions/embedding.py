"""Embeddings: which operators stay whole until they are written as ONNX."""

from __future__ import annotations

import torch

from lightning_ort.compiler.decompositions.registry import keeps

aten = torch.ops.aten

keeps(aten.embedding.default, aten.embedding_dense_backward.default)
