"""The part of a step that computes some of its values, with the weights inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor

from lightning_ort.compiler.passes.unused_inputs import RemoveUnusedInputsPass
from lightning_ort.files.onnx_models import save_onnx
from lightning_ort.ondevice.step_graph import StepGraph

__all__ = ["save_inference_model"]


def save_inference_model(graph: StepGraph, tensors: Mapping[str, Tensor], path: Path, outputs: Sequence[str]) -> None:
    """Write a model from the inputs of ``graph`` that are needed to its values ``outputs``.

    Raises:
        ValueError: the graph has no such value, or none is asked for.
    """
    model = graph.model.clone()
    values = {str(v.name): v for node in model.graph for v in node.outputs}
    unknown = [n for n in outputs if n not in values]
    if unknown or not outputs:
        given = ", ".join(str(v.name) for v in model.graph.outputs)
        raise ValueError(
            f"The graph has no value {', '.join(map(repr, unknown)) or 'to be exported'}. It gives: {given}."
        )
    model.graph.outputs.clear()
    model.graph.outputs.extend(values[n] for n in outputs)
    for value in list(model.graph.inputs):
        name = graph.tensors.get(str(value.name))
        if name is not None:
            model.graph.inputs.remove(value)
            value.const_value = ir.Tensor(tensors[name].detach().cpu().contiguous().numpy(), name=value.name)
            model.graph.register_initializer(value)
    RemoveUnusedNodesPass()(model)
    RemoveUnusedInputsPass()(model)
    save_onnx(model, path)
