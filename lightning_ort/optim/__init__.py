"""Optimizers: configurations and schedules of :class:`~lightning_ort.ORTTrainer`, and their torch counterparts."""

from __future__ import annotations

from lightning_ort.optim import lr_scheduler
from lightning_ort.optim.config import AdamConfig, LambConfig, SGDConfig, _OptimizerConfig
from lightning_ort.optim.conversion import config_from_torch
from lightning_ort.optim.lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    PolyWarmupLRScheduler,
    _LRScheduler,
)
from lightning_ort.optim.optimizers import AdamW, Lamb

__all__ = [
    "AdamConfig",
    "AdamW",
    "ConstantWarmupLRScheduler",
    "CosineWarmupLRScheduler",
    "Lamb",
    "LambConfig",
    "LinearWarmupLRScheduler",
    "PolyWarmupLRScheduler",
    "SGDConfig",
    "_LRScheduler",
    "_OptimizerConfig",
    "config_from_torch",
    "lr_scheduler",
]
