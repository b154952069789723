"""Loss scaling for training in float16."""

from __future__ import annotations

from lightning_ort.amp.loss_scaler import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "LossScaler"]
