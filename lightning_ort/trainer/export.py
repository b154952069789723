"""The model with its loss as an ONNX file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir
from torch import Tensor

from lightning_ort.export.checking import check_sample
from lightning_ort.export.export import undisturbed
from lightning_ort.export.graph import make_graph, name_weights
from lightning_ort.export.inputs import InferenceModule, call_with
from lightning_ort.files.onnx_models import save_onnx
from lightning_ort.trainer.description import Description
from lightning_ort.trainer.options import ORTTrainerOptions
from lightning_ort.trainer.step import CombinedModule
from lightning_ort.verification import difference

__all__ = ["check_export", "export", "inferred", "results_of", "save"]


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


def save(
    model: ir.Model | onnx.ModelProto,
    path: str | os.PathLike[str],
    check: Callable[[Path], None] = lambda file: None,
) -> None:
    """Write a file that is complete when it appears; weights of more than 2 GB go to a second one beside it.

    Args:
        check: called with the path of the file before it has its name.
    """
    save_onnx(model if isinstance(model, ir.Model) else ir.from_proto(model), Path(path), check=check)


def check_export(model: ir.Model, names: Sequence[str], inputs: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Run ``model`` and compare its outputs; see :func:`~lightning_ort.export.checking.check_sample`."""
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder, "model.onnx"), lambda file: check_sample(file, names, inputs, expected))


def results_of(combined: CombinedModule, names: Sequence[str], inputs: Sequence[Tensor]) -> list[Tensor] | None:
    """What model and loss give in evaluation mode, by torch; ``None`` where that is something else each time."""
    with undisturbed(combined):
        function = InferenceModule(combined, call_with(inputs, names))
        first, second = function(*inputs), function(*inputs)
    same = all(difference(a, b, allowed=0.0) is None for a, b in zip(first, second, strict=True))
    return first if same else None
