"""Optimizers: configurations and schedules of :class:`~lightning_ort.ORTTrainer`, and their torch counterparts."""

from __future__ import annotations

from lightning_ort.optim import lr_scheduler
from lightning_ort.optim.adamw import AdamW
from lightning_ort.optim.config import AdamConfig, LambConfig, SGDConfig, _OptimizerConfig
from lightning_ort.optim.conversion import config_from_torch
from lightning_ort.optim.lamb import Lamb

__all__ = [
    "AdamConfig",
    "AdamW",
    "Lamb",
    "LambConfig",
    "SGDConfig",
    "_OptimizerConfig",
    "config_from_torch",
    "lr_scheduler",
]
