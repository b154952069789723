"""Optimizer configurations and learning rate schedules of :class:`~lightning_ort.ORTTrainer`."""

from __future__ import annotations

from lightning_ort.optim import lr_scheduler
from lightning_ort.optim.config import AdamConfig, LambConfig, SGDConfig, _OptimizerConfig

__all__ = ["AdamConfig", "LambConfig", "SGDConfig", "_OptimizerConfig", "lr_scheduler"]
