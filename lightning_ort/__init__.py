"""Train unchanged LightningModules in ONNX Runtime."""

from __future__ import annotations

from lightning_ort._version import __version__

__all__ = ["__version__"]
