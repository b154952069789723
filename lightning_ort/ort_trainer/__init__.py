"""The older interface, ``onnxruntime.capi.ort_trainer``, on top of :class:`lightning_ort.ORTTrainer`."""

from __future__ import annotations

from lightning_ort.ort_trainer.checkpoint import load_checkpoint, save_checkpoint
from lightning_ort.ort_trainer.description import IODescription, ModelDescription, generate_sample
from lightning_ort.ort_trainer.scaler import LossScaler
from lightning_ort.ort_trainer.trainer import ORTTrainer

__all__ = [
    "IODescription",
    "LossScaler",
    "ModelDescription",
    "ORTTrainer",
    "generate_sample",
    "load_checkpoint",
    "save_checkpoint",
]
