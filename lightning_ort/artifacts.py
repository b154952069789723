"""``onnxruntime.training.artifacts``: what :mod:`lightning_ort.ondevice` has of it, under its name."""

from __future__ import annotations

from lightning_ort.ondevice.artifacts import generate_artifacts
from lightning_ort.ondevice.generation.objectives import LossType
from lightning_ort.ondevice.optimizer_config import OptimType

__all__ = ["LossType", "OptimType", "generate_artifacts"]
