"""The module that is trained."""

from __future__ import annotations

import onnx
from torch import nn

from lightning_ort.onnx_reader import to_torch
from lightning_ort.trainer.description import Description
from lightning_ort.trainer.options import ORTTrainerOptions

__all__ = ["make_module"]


def make_module(model: nn.Module | onnx.ModelProto, description: Description, options: ORTTrainerOptions) -> nn.Module:
    """``model`` itself, or an ONNX model converted.

    Raises:
        NotImplementedError: ``extra_postprocess``, which rewrites ONNX models, was given for a module.
        ValueError: names of an ONNX model are not those described.
    """
    rewrite = options._internal_use.extra_postprocess
    if isinstance(model, nn.Module):
        if rewrite is not None:
            raise NotImplementedError(
                "options['_internal_use.extra_postprocess'] rewrites the ONNX model that is trained, but a module is "
                "compiled without one. Export it, and train the onnx.ModelProto."
            )
        return model
    if rewrite is not None:
        model = rewrite(model) or model
    assert isinstance(model, onnx.ModelProto)
    stored = {initializer.name for initializer in model.graph.initializer}
    for kind, described, values in (
        ("inputs", description.inputs, model.graph.input),
        ("outputs", description.outputs, model.graph.output),
    ):
        own = [value.name for value in values if value.name not in stored]
        wanted = [entry.name for entry in described]
        if own != wanted:
            raise ValueError(f"The ONNX model has the {kind} {own}, but model_desc describes {wanted}.")
    return to_torch(model)
