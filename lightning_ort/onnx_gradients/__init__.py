"""Gradients of a forward ONNX graph, as an ONNX graph for any ONNX Runtime."""

from lightning_ort.onnx_gradients.graph_builder import GradientGraphBuilder

__all__ = ["GradientGraphBuilder"]
