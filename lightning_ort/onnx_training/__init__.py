"""Training of a forward ONNX graph in ONNX Runtime."""

from lightning_ort.onnx_training.parameters import TrainingParameters
from lightning_ort.onnx_training.session import TrainingSession

__all__ = ["TrainingParameters", "TrainingSession"]
