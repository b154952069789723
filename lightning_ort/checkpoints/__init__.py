"""Checkpoints: files of Lightning and of ORTTrainer, and the way from one to the other."""

from __future__ import annotations

from lightning_ort.checkpoints.lightning import ORTCheckpointIO

__all__ = ["ORTCheckpointIO"]
