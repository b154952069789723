"""``onnxruntime.training.experimental``: the gradient graph of a torch module."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from lightning_ort.export.export import undisturbed
from lightning_ort.onnx_reader.load import MAX_OPSET, MIN_OPSET
from lightning_ort.runtime.tensors import ONNX
from lightning_ort.training_session.gradient_graph import GradientGraphBuilder
from lightning_ort.validation import path, shown, whole

__all__ = ["export_gradient_graph"]


class _Loss(nn.Module):
    """Output and loss from input and labels."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, example: Any, labels: Any) -> tuple[Any, Tensor]:
        output = self.model(example)
        return output, self.loss_fn(output, labels)


def export_gradient_graph(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    example_input: Tensor,
    example_labels: Tensor,
    gradient_graph_path: str | os.PathLike[str],
    opset_version: int = 17,
) -> None:
    """Write an ONNX graph of outputs, loss and gradients in training mode; :class:`~lightning_ort.GradientGraphBuilder`
    makes one of an ONNX file.

    Its inputs are ``input``, ``labels`` and the parameters by their names, its outputs ``output``, ``loss`` and
    ``<parameter>_grad`` for those that require a gradient. The first size of ``input``, ``labels`` and ``output`` may
    vary.

    Args:
        model: takes the input; is not changed.
        loss_fn: from its output and the labels to a scalar tensor.
        example_input: an example.
        example_labels: the labels that belong to it.
        gradient_graph_path: of the file.
        opset_version: in which ``model`` is exported, 13 to 17; the written graph has opset 20.

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedError: an operation that has no gradient in ONNX.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={shown(model)}: expected a torch.nn.Module.")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn={shown(loss_fn)}: expected a function of output and labels.")
    for name, example in (("example_input", example_input), ("example_labels", example_labels)):
        if not isinstance(example, Tensor):
            raise TypeError(f"{name}={shown(example)}: expected a torch.Tensor.")
    target = path("gradient_graph_path", gradient_graph_path)
    whole("opset_version", opset_version, low=MIN_OPSET, high=min(MAX_OPSET, 17))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ValueError(f"No parameter of {type(model).__name__} requires a gradient.")
    combined, buffer = _Loss(model, loss_fn), io.BytesIO()
    batch = {0: "batch_size"}
    with warnings.catch_warnings(), undisturbed(combined):
        warnings.simplefilter("ignore")  # the exporter to these opsets is deprecated, and speaks of constants
        combined.train()
        torch.onnx.export(
            combined,
            (example_input.detach(), example_labels.detach()),
            buffer,  # type: ignore[arg-type]  # a stream is taken by this exporter
            dynamo=False,
            training=torch.onnx.TrainingMode.PRESERVE,
            opset_version=opset_version,
            input_names=["input", "labels"],
            output_names=["output", "loss"],
            dynamic_axes=dict.fromkeys(("input", "labels", "output"), batch),
            do_constant_folding=False,
        )
    forward = _with_parameters_as_inputs(onnx.load_from_string(buffer.getvalue()), model)
    builder = GradientGraphBuilder(forward, {"loss"}, trained, "loss")
    builder.build()
    builder.save(target)


def _with_parameters_as_inputs(proto: onnx.ModelProto, model: nn.Module) -> onnx.ModelProto:
    """``proto``, in which parameters are initializers with a prefix, with all of ``model``'s as inputs."""
    graph, prefix = proto.graph, "model."
    types = {i.name.removeprefix(prefix): i.data_type for i in graph.initializer}
    parameters = dict(model.named_parameters())
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [n.removeprefix(prefix) for n in names]
    kept = [i for i in graph.initializer if i.name.removeprefix(prefix) not in parameters]
    for initializer in kept:
        initializer.name = initializer.name.removeprefix(prefix)
    del graph.initializer[:]
    graph.initializer.extend(kept)
    for name, p in parameters.items():
        kind = types.get(name, int(ONNX[p.dtype]))
        graph.input.append(onnx.helper.make_tensor_value_info(name, kind, list(p.shape)))
    return proto
