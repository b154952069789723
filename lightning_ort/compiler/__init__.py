"""From a step function to ONNX graphs: the backend for ``torch.compile``."""

from __future__ import annotations

from lightning_ort.compiler.backend import ORTBackend, backend

__all__ = ["ORTBackend", "backend"]
