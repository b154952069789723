"""Ahead-of-time joint graphs: forward pass and gradients of a whole step, written as one ONNX graph."""
