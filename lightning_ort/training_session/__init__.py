"""Training of a forward ONNX graph in ONNX Runtime."""

from lightning_ort.training_session.parameters import TrainingParameters
from lightning_ort.training_session.session import TrainingSession

__all__ = ["TrainingParameters", "TrainingSession"]
