"""A tiny model with the inputs, outputs and metadata of a training session, which has ``NodeArg`` objects."""

from __future__ import annotations

from typing import Any

import onnx
import onnxruntime
from onnx import TensorProto, helper

from lightning_ort.runtime.providers.cpu import cpu_session
from lightning_ort.training_session.graph import TrainingGraph

__all__ = ["SessionInfo", "signature_session"]


def signature_session(
    model: onnx.ModelProto, learning_rate: str | None, extra: list[onnx.ValueInfoProto]
) -> onnxruntime.InferenceSession:
    """A session that describes a training session of ``model``, and computes nothing.

    Args:
        learning_rate: name of the input of the learning rate.
        extra: outputs besides those of ``model``.
    """
    initializers = {i.name for i in model.graph.initializer}
    inputs = [i for i in model.graph.input if i.name not in initializers]
    if learning_rate is not None:
        inputs.append(helper.make_tensor_value_info(learning_rate, TensorProto.FLOAT, [1]))
    outputs = [*model.graph.output, *extra]
    names = {i.name for i in inputs}
    longer = "_" * max(len(v.name) for v in [*inputs, *outputs])  # than all names, and so the beginning of none
    one, minus_one, indices, shape = (f"{longer}{name}" for name in ("one", "minus_one", "indices", "shape"))
    # a tensor of unknown shape for every output, so that the declared shapes stand
    nodes = [
        helper.make_node("Constant", [], [one], value_float=1.0),
        helper.make_node("Constant", [], [minus_one], value_ints=[-1]),
        helper.make_node("NonZero", [one], [indices]),
        helper.make_node("Reshape", [indices, minus_one], [shape]),
    ]
    for value in outputs:
        if value.name in names:
            continue
        dtype = value.type.tensor_type.elem_type
        tensor = helper.make_tensor("value", dtype, [1], [0])
        nodes.append(helper.make_node("ConstantOfShape", [shape], [value.name], value=tensor))
    graph = helper.make_graph(nodes, model.graph.name or "training", inputs, outputs, doc_string=model.graph.doc_string)
    described = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    described.producer_name = model.producer_name
    described.domain, described.model_version = model.domain, model.model_version
    described.doc_string = model.doc_string
    described.metadata_props.extend(model.metadata_props)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return cpu_session(described.SerializeToString(), options)


class SessionInfo:
    """Inputs, outputs, providers, profiling and fallback, with the methods of ``onnxruntime.InferenceSession``."""

    _signature: onnxruntime.InferenceSession
    _train: TrainingGraph
    _fallback: bool

    def get_inputs(self) -> list[Any]:
        """The inputs of a run as ``NodeArg``: those of the model that are no initializers, and the learning rate."""
        return self._signature.get_inputs()

    def get_outputs(self) -> list[Any]:
        """The outputs of a training run as ``NodeArg``."""
        return self._signature.get_outputs()

    def get_overridable_initializers(self) -> list[Any]:
        """None: weights live in the session and are changed by :meth:`load_state`."""
        return self._signature.get_overridable_initializers()

    def get_modelmeta(self) -> Any:
        """The metadata of the forward model."""
        return self._signature.get_modelmeta()

    def get_session_options(self) -> onnxruntime.SessionOptions:
        """Options of the session that computes the gradients."""
        return self._inner().get_session_options()

    def get_providers(self) -> list[str]:
        """Registered execution providers."""
        return self._inner().get_providers()

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Options of the registered execution providers."""
        return self._inner().get_provider_options()

    def get_profiling_start_time_ns(self) -> int:
        """When profiling started, comparable to ``time.monotonic_ns()``."""
        return self._inner().get_profiling_start_time_ns()

    def end_profiling(self) -> str:
        """Name of the file with the profile, if ``sess_options.enable_profiling`` was set."""
        return self._inner().end_profiling()

    def disable_fallback(self) -> None:
        """Let an execution provider's failure be an error."""
        self._fallback = False

    def enable_fallback(self) -> None:
        """Go on with the CPU's provider after another one has failed, with a warning; the default."""
        self._fallback = True

    def _inner(self) -> onnxruntime.InferenceSession:
        return self._train.runner.session
