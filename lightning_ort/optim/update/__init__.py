"""The graph that applies a rule to all parameters at once, in place."""

from __future__ import annotations

from lightning_ort.optim.update.update import Update

__all__ = ["Update"]
