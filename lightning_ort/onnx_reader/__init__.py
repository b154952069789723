"""ONNX graphs as torch modules, so that they can be differentiated and compiled like any other module."""

from lightning_ort.onnx_reader.module import OnnxModule, to_torch

__all__ = ["OnnxModule", "to_torch"]
