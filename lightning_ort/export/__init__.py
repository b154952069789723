"""Trained modules as ONNX files for inference: written, checked, and only then there."""

from __future__ import annotations

from lightning_ort.export.export import ExportedModel, export_onnx
from lightning_ort.export.trained import ORTExport, export_trained

__all__ = ["ExportedModel", "ORTExport", "export_onnx", "export_trained"]
