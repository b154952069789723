"""The graphs that TrainingParameters asks to be written to files."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from lightning_ort.files.onnx_models import save_onnx
from lightning_ort.onnx_gradients import GradientGraphBuilder
from lightning_ort.onnx_training.optimizers import WeightUpdate
from lightning_ort.onnx_training.parameters import TrainingParameters

__all__ = ["save_graphs"]


def save_graphs(
    model: onnx.ModelProto,
    parameters: TrainingParameters,
    loss: str,
    weights: list[str],
    updates: WeightUpdate | None,
) -> None:
    """Write the forward graph as it was read, the gradient graph, and the graph of the update.

    The update is a graph of its own, because ONNX Runtime might write a weight before it has read it: the file of
    ``model_with_training_graph_path`` is the gradient graph, and the update lies beside it as ``<path>.update.onnx``.
    """
    if parameters.model_after_graph_transforms_path:
        save_onnx(ir.from_proto(model), Path(parameters.model_after_graph_transforms_path))
    paths = [p for p in (parameters.model_with_gradient_graph_path, parameters.model_with_training_graph_path) if p]
    if not paths:
        return
    builder = GradientGraphBuilder(model, {loss}, set(weights), loss)
    builder.build()
    for path in paths:
        builder.save(path)
    if parameters.model_with_training_graph_path and updates is not None:
        save_onnx(updates.model, Path(f"{parameters.model_with_training_graph_path}.update.onnx"))
