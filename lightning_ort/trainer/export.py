"""The model with its loss as an ONNX file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import Tensor

from lightning_ort.errors import MismatchError
from lightning_ort.export.checking import open_session
from lightning_ort.export.export import undisturbed
from lightning_ort.export.graph import make_graph, name_weights
from lightning_ort.export.inputs import InferenceModule, call_with
from lightning_ort.files.onnx_models import save_onnx
from lightning_ort.trainer.description import Description
from lightning_ort.trainer.options import ORTTrainerOptions
from lightning_ort.trainer.step import CombinedModule
from lightning_ort.verification import TRAINED_FILE, difference, largest

__all__ = ["check_export", "export", "inferred", "save"]


def export(
    combined: CombinedModule, description: Description, inputs: Sequence[Tensor], options: ORTTrainerOptions
) -> ir.Model:
    """The model in evaluation mode, from all described inputs to all described outputs, with the present weights.

    Args:
        combined: model and loss.
        description: names of inputs and outputs; sizes that have a name there are left open.
        inputs: an example.
        options: ``_internal_use`` tells the opset, whether contrib operators may occur, and whether the graph is
            cleaned; ``utils.run_symbolic_shape_infer`` writes the shapes of all values.

    Raises:
        ExportError: torch cannot trace the model for all sizes that are left open, or an operator has no form in the
            opset.
    """
    internal = options._internal_use
    names = [entry.name for entry in description.inputs]
    axes = {
        entry.name: {i: size for i, size in enumerate(entry.shape) if isinstance(size, str)}
        for entry in description.inputs
    }
    tensors = [x.detach().clone() for x in inputs]
    with undisturbed(combined):
        model = make_graph(
            InferenceModule(combined, call_with(tensors, names)),
            names,
            description.output_names(),
            tensors,
            axes,
            internal.onnx_opset_version,
            clean=internal.enable_internal_postprocess,
            contrib=internal.enable_onnx_contrib_ops,
            trainable=True,
            what=type(combined.model).__name__,
            advice="a number in model_desc",
        )
    name_weights(model, "model.")
    if options.utils.run_symbolic_shape_infer:
        model = ir.from_proto(inferred(ir.to_proto(model)))
    return model


def inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` with the shapes of its values, as ONNX Runtime's symbolic shape inference finds them."""
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    return SymbolicShapeInference.infer_shapes(model, auto_merge=True, guess_output_rank=False)


def save(model: ir.Model | onnx.ModelProto, path: str | os.PathLike[str]) -> None:
    """Write a file that is complete when it appears; weights of more than 2 GB go to a second one beside it."""
    save_onnx(model if isinstance(model, ir.Model) else ir.from_proto(model), Path(path))


def check_export(model: ir.Model, inputs: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Run ``model`` and compare its outputs.

    Raises:
        MismatchError: names the first output that differs by more than
            :data:`~lightning_ort.verification.TRAINED_FILE` allows.
    """
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder, "model.onnx"))
        session = open_session(Path(folder, "model.onnx"))
    known = {i.name for i in session.get_inputs()}
    feed: dict[str, Any] = {name: x.detach().cpu().numpy() for name, x in inputs.items() if name in known}
    for name, got in zip(expected, session.run(list(expected), feed), strict=True):
        wanted = expected[name].detach().cpu()
        tolerance = TRAINED_FILE.get(wanted.dtype, 0.0)
        problem = difference(torch.from_numpy(np.asarray(got)), wanted, allowed=tolerance * max(largest(wanted), 1.0))
        if problem is not None:
            raise MismatchError(
                f"check_model_export: output {name!r} of the exported ONNX model is off by more than {tolerance:g} of "
                f"the largest entry of the module's: {problem}."
            )
