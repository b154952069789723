"""``onnxruntime.training.experimental``: the gradient graph of a torch module."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from lightning_ort.checkpoints.state import TrainingState
from lightning_ort.compiler.reference import ForkedRNG
from lightning_ort.files.onnx_models import save_onnx
from lightning_ort.ondevice.generation.checking import check_step
from lightning_ort.ondevice.generation.inputs import infos_of
from lightning_ort.ondevice.generation.objectives import Inference, LossOf, ModuleForward
from lightning_ort.ondevice.generation.sources import without_side_effects
from lightning_ort.ondevice.generation.step_graphs import gradient_graph
from lightning_ort.runtime.tensors import ONNX
from lightning_ort.validation import path, shown, whole

__all__ = ["export_gradient_graph"]

_OUTPUT = "output"
_ADVICE = "Nothing was written. Please report it with the model."


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
    vary. Before it is written, what it computes from the example is compared with torch, unless it draws random
    numbers or torch's loss is not finite.

    Args:
        model: takes the input and returns a tensor; is not changed.
        loss_fn: from its output and the labels to a scalar tensor.
        example_input: an example.
        example_labels: the labels that belong to it.
        gradient_graph_path: of the file.
        opset_version: accepted for old scripts, 12 to 20; the graph has opset 20, which its operators need.

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedError: an operation that has no gradient in ONNX.
        MismatchError: the graph computes something else than torch.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={shown(model)}: expected a torch.nn.Module.")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn={shown(loss_fn)}: expected a function of output and labels.")
    for name, tensor in (("example_input", example_input), ("example_labels", example_labels)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}={shown(tensor)}: expected a torch.Tensor.")
    target = path("gradient_graph_path", gradient_graph_path)
    whole("opset_version", opset_version, low=12, high=20)
    parameters = dict(model.named_parameters())
    trained = sorted(name for name, p in parameters.items() if p.requires_grad)
    if not trained:
        raise ValueError(f"No parameter of {type(model).__name__} requires a gradient.")
    example = {"input": example_input.detach().cpu(), "labels": example_labels.detach().cpu()}
    objective = without_side_effects(LossOf(Inference(model, [None], [_OUTPUT]), loss_fn))
    assert isinstance(objective, LossOf)
    axes = {name: {0: "batch_size"} for name, tensor in example.items() if tensor.dim()}
    forward = ModuleForward(objective, infos_of(example, axes), example)
    objective.train()
    loss = _loss(forward, example)
    graph, random = gradient_graph(forward, list(parameters), trained)
    if not random and math.isfinite(loss):
        state = TrainingState(
            {n: p.detach().cpu() for n, p in forward.parameters.items()},
            tuple(trained),
            {n: b.detach().cpu() for n, b in forward.buffers.items()},
        )
        check_step(graph, state, forward, example, _ADVICE)
    _order(graph.model.graph, parameters)
    save_onnx(graph.model, Path(target))


def _loss(forward: ModuleForward, example: dict[str, Tensor]) -> float:
    """The loss of the example in torch, whose own errors come before those of a trace."""
    tensors = {n: t.detach().cpu().clone() for n, t in (forward.parameters | forward.buffers).items()}
    with torch.no_grad(), ForkedRNG(torch.device("cpu")):
        loss, *_ = forward.call(tensors, [t.clone() for t in example.values()])
    return float(loss)


def _order(graph: ir.Graph, parameters: dict[str, nn.Parameter]) -> None:
    """``input``, ``labels`` and all parameters go in, also those that nothing reads; ``output`` comes first."""
    inputs = {str(v.name): v for v in graph.inputs}
    for name, p in parameters.items():
        if name not in inputs:
            kind = ir.TensorType(ir.DataType(int(ONNX[p.dtype])))
            inputs[name] = ir.Value(name=name, type=kind, shape=ir.Shape(p.shape))
    graph.inputs.clear()
    graph.inputs.extend(inputs[name] for name in ("input", "labels", *parameters))
    results = sorted(graph.outputs, key=lambda v: v.name != _OUTPUT)
    graph.outputs.clear()
    graph.outputs.extend(results)
