"""Artifacts that ONNX Runtime's own training API loads and trains."""

from lightning_ort.ondevice.formats.ort_training.flavour import OrtTraining

__all__ = ["OrtTraining"]
