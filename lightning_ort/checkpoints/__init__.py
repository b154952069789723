"""Checkpoints: one file per format, and the ways from one to another."""

from __future__ import annotations

from lightning_ort.checkpoints.lightning import ORTCheckpointIO

__all__ = ["ORTCheckpointIO"]
