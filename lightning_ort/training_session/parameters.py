"""What a TrainingSession is told: the properties of the reference page, each checked."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from lightning_ort.compiler.aot.joint import GRAD
from lightning_ort.errors import UnsupportedError
from lightning_ort.onnx_reader.initializers import trainable_initializers
from lightning_ort.onnx_reader.registry import OPERATORS
from lightning_ort.validation import is_number, is_whole, listed, shown

__all__ = [
    "ACCUMULATED", "ALL_FINITE", "TrainingParameters", "check_names", "check_types", "check_weights", "trained_weights",
    "why_none",
]  # fmt: skip

ALL_FINITE = "all_finite"
ACCUMULATED = "Group_Accumulated_Gradients"

_UPDATED = {TensorProto.FLOAT, TensorProto.DOUBLE}
"""Element types of weights that the optimizers update."""

_NOT_CUT = "the graph is not cut into stages or slices: every process trains a copy of the whole model"
_OWN_MEMORY = "activations are freed as early as eager frees them, and none is computed twice"
_FP16 = "it computes in the element types of the ONNX file; convert the file, or set loss_scale for a float16 file"

# name: (default, why another value is refused; None where it has an effect)
_PROPERTIES: dict[str, tuple[Any, str | None]] = {
    "allreduce_post_accumulation": (False, None),
    "attn_dropout_recompute": (False, _OWN_MEMORY),
    "data_parallel_size": (1, None),
    "deepspeed_zero_stage": (0, None),
    "enable_adasum": (False, None),
    "enable_grad_norm_clip": (True, None),
    "gelu_recompute": (False, _OWN_MEMORY),
    "gradient_accumulation_steps": (1, None),
    "horizontal_parallel_size": (1, _NOT_CUT),
    "immutable_weights": ({}, None),
    "loss_output_name": ("", None),
    "loss_scale": (0.0, None),
    "lr_params_feed_name": ("Learning_Rate", None),
    "model_after_graph_transforms_path": ("", None),
    "model_with_gradient_graph_path": ("", None),
    "model_with_training_graph_path": ("", None),
    "num_pipeline_micro_batches": (1, _NOT_CUT),
    "number_recompute_layers": (0, _OWN_MEMORY),
    "optimizer_attributes_map": ({}, None),
    "optimizer_int_attributes_map": ({}, None),
    "pipeline_cut_info_string": ("", _NOT_CUT),
    "pipeline_parallel_size": (1, _NOT_CUT),
    "propagate_cast_ops_allow": ([], "casts stay where the ONNX file has them"),
    "propagate_cast_ops_level": (-1, "casts stay where the ONNX file has them"),
    "set_gradients_as_graph_outputs": (False, None),
    "sliced_axes": ({}, _NOT_CUT),
    "sliced_schema": ({}, _NOT_CUT),
    "sliced_tensor_names": ([], _NOT_CUT),
    "training_optimizer_name": ("", None),
    "transformer_layer_recompute": (False, _OWN_MEMORY),
    "use_fp16_moments": (False, "moments have the element type of their weight"),
    "use_memory_efficient_gradient": (False, _OWN_MEMORY),
    "use_mixed_precision": (False, _FP16),
    "weights_not_to_train": (set(), None),
    "weights_to_train": (set(), None),
    "world_rank": (0, None),
    "world_size": (1, None),
}


class TrainingParameters:
    """How a :class:`~lightning_ort.TrainingSession` trains; see the table in ``docs/training-session.md``.

    Every property of the reference page is here with its default. Setting one to a value of another type raises a
    ``TypeError``; setting one that has no effect to another value than its default raises a ``ValueError`` that says
    why. Collections are copied.
    """

    def __init__(self) -> None:
        self._values = {name: copy.deepcopy(default) for name, (default, _) in _PROPERTIES.items()}
        self._initial_state: dict[str, dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"TrainingParameters has no property {name!r}. Properties: {', '.join(_PROPERTIES)}.")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        if name not in _PROPERTIES:
            raise AttributeError(f"TrainingParameters has no property {name!r}. Properties: {', '.join(_PROPERTIES)}.")
        default, refusal = _PROPERTIES[name]
        value = _checked(name, value, default)
        if refusal is not None and value != default:
            raise ValueError(
                f"TrainingParameters.{name} = {value!r} is not supported: {refusal}. Leave it at {default!r}."
            )
        self._values[name] = value

    def __copy__(self) -> TrainingParameters:
        """One of its own, with copies of the collections; the arrays of the initial state are shared."""
        other = TrainingParameters()
        other._values, other._initial_state = copy.deepcopy(self._values), self._initial_state
        return other

    def __dir__(self) -> list[str]:
        return sorted([*super().__dir__(), *_PROPERTIES])

    def __repr__(self) -> str:
        changed = ", ".join(f"{n}={v!r}" for n, v in self._values.items() if v != _PROPERTIES[n][0])
        return f"TrainingParameters({changed})"

    def set_optimizer_initial_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Start the optimizer from ``state``: per weight ``Moment_1``, ``Moment_2`` and ``Update_Count`` as arrays.

        For LAMB the counter is under ``shared_optimizer_state``, as ``Step``. It is the form of
        ``TrainingSession.get_optimizer_state``.
        """
        if not isinstance(state, Mapping) or not all(isinstance(v, Mapping) for v in state.values()):
            raise TypeError("state must map weight names to mappings of state names to arrays.")
        self._initial_state = {weight: dict(values) for weight, values in state.items()}


def _checked(name: str, value: Any, default: Any) -> Any:
    expected = type(default)
    if isinstance(default, bool):
        right = isinstance(value, bool)
    elif isinstance(default, float):
        right = is_number(value)
    elif isinstance(default, int):
        right = is_whole(value)
    elif isinstance(default, set):
        right = isinstance(value, (set, frozenset, list, tuple)) and all(isinstance(v, str) for v in value)
    elif isinstance(default, list):
        right = isinstance(value, (list, tuple))
    elif isinstance(default, dict):
        right = isinstance(value, Mapping)
    else:
        right = isinstance(value, str)
    if not right:
        raise TypeError(f"TrainingParameters.{name} must be of type {expected.__name__}, not {value!r}.")
    if name == "gradient_accumulation_steps" and value < 1:
        raise ValueError(f"TrainingParameters.gradient_accumulation_steps must be at least 1, not {value}.")
    if (name in ("data_parallel_size", "world_size") and value < 1) or (name == "world_rank" and value < 0):
        raise ValueError(f"TrainingParameters.{name} must be at least {0 if name == 'world_rank' else 1}, not {value}.")
    if name == "deepspeed_zero_stage" and value not in (0, 1):
        raise ValueError(f"TrainingParameters.deepspeed_zero_stage must be 0 or 1, not {value}.")
    if name == "loss_scale" and not 0 <= value < float("inf"):
        raise ValueError(f"TrainingParameters.loss_scale must be 0 (none) or a positive number, not {value}.")
    if isinstance(default, bool):
        return value
    try:
        return copy.deepcopy(expected(value))
    except Exception as error:
        raise TypeError(f"TrainingParameters.{name} holds what cannot be copied: {error}.") from error


def check_names(model: onnx.ModelProto, parameters: TrainingParameters) -> None:
    """
    Raises:
        ValueError: ``loss_output_name`` is no output; or what the learning rate is fed as, or what a session gives
            out besides, is called like a value of the model.
    """
    outputs = [o.name for o in model.graph.output]
    if not parameters.loss_output_name:
        raise ValueError("TrainingParameters.loss_output_name is not set; expected the output that is the loss.")
    if parameters.loss_output_name not in outputs:
        raise ValueError(f"loss_output_name is {parameters.loss_output_name!r}; the model's outputs are {outputs}.")
    used = {name: "a value" for node in model.graph.node for name in node.output}
    used |= dict.fromkeys(outputs, "an output") | {i.name: "an input" for i in model.graph.input}
    used |= {i.name: "an initializer" for i in model.graph.initializer}
    for added, option, off in (
        (ALL_FINITE, "loss_scale", not parameters.loss_scale),
        (ACCUMULATED, "gradient_accumulation_steps", parameters.gradient_accumulation_steps == 1),
    ):
        if not off and added in used:
            raise ValueError(
                f"The model has {used[added]} {added!r}, which is an output that TrainingParameters.{option} adds; "
                f"rename it in the model, or leave {option} at {_PROPERTIES[option][0]}."
            )
        used |= {} if off else {added: "an output"}
    if parameters.set_gradients_as_graph_outputs:
        used |= {f"{i.name}{GRAD}": "an output" for i in model.graph.initializer}
    rate = parameters.lr_params_feed_name
    if not parameters.training_optimizer_name:
        return
    if not rate:
        raise ValueError("lr_params_feed_name='': expected the name of the input as which the learning rate is fed.")
    if rate in used:
        raise ValueError(
            f"The model has {used[rate]} {rate!r}, which is what the learning rate is fed as; expected another name in "
            "TrainingParameters.lr_params_feed_name."
        )


def check_weights(model: onnx.ModelProto, parameters: TrainingParameters) -> None:
    """
    Raises:
        TypeError: ``immutable_weights`` is of another form.
        ValueError: ``weights_to_train`` or ``weights_not_to_train`` names an initializer that the model lacks, or
            ``immutable_weights`` an operator that does not exist, or a negative position.
    """
    for operator, positions in parameters.immutable_weights.items():
        fits = isinstance(positions, Mapping) and all(is_whole(k) and is_number(v) for k, v in positions.items())
        if not isinstance(operator, str) or not fits:
            raise TypeError(
                f"immutable_weights has {shown(operator)}: {shown(positions)}; expected operator types to mappings "
                "from the position of an input to a number."
            )
        if not onnx.defs.has(operator) and operator not in {name for _, name in OPERATORS}:
            raise ValueError(
                f"immutable_weights has {operator!r}, which no model can have; expected operator types, such as 'Mul'."
            )
        if any(k < 0 for k in positions):
            raise ValueError(
                f"immutable_weights has {operator!r}: {shown(positions)}; expected positions of inputs, counted from 0."
            )
    known = [i.name for i in model.graph.initializer]
    for attribute in ("weights_to_train", "weights_not_to_train"):
        unknown = sorted(set(getattr(parameters, attribute)) - set(known))
        if unknown:
            listed = ", ".join(map(repr, unknown))
            raise ValueError(f"{attribute}: the model has no initializer {listed}. It has: {', '.join(known)}.")


def trained_weights(model: onnx.ModelProto, parameters: TrainingParameters) -> list[str]:
    """Names in the order of the file, of those that :func:`check_weights` accepts."""
    known = [i.name for i in model.graph.initializer]
    wanted, excluded = parameters.weights_to_train, parameters.weights_not_to_train
    chosen = wanted or set(trainable_initializers(model, excluded)) - _immutable(model, parameters.immutable_weights)
    return [name for name in known if name in chosen and name not in excluded]


def why_none(model: onnx.ModelProto, parameters: TrainingParameters) -> str:
    """Say which option leaves no weight to be trained, where :func:`trained_weights` finds none."""
    wanted, excluded = parameters.weights_to_train, parameters.weights_not_to_train
    known = sorted(wanted) or trainable_initializers(model, excluded)
    if not known:
        return "no float initializer of the model leads to an output in a way that has a gradient."
    option = "weights_not_to_train" if not set(known) - excluded else "weights_not_to_train and immutable_weights"
    if not excluded & set(known):
        option = "immutable_weights"
    source = "of weights_to_train" if wanted else "that could be"
    return f"{option} names all weights {source} ({', '.join(known)}). Leave out what is to be trained."


def check_types(model: onnx.ModelProto, trained: Collection[str], optimizer: str) -> None:
    """
    Raises:
        UnsupportedError: an optimizer cannot update an initializer of this element type.
    """
    wrong = [i for i in model.graph.initializer if i.name in trained and i.data_type not in _UPDATED]
    if wrong:
        kind = TensorProto.DataType.Name(wrong[0].data_type).lower()
        raise UnsupportedError(
            f"The weights {listed(repr(i.name) for i in wrong)} are {kind}; "
            f"training_optimizer_name={optimizer!r} updates float and double ones. "
            "Store the weights as float, with a Cast behind each where the graph computes in 16 bits; or leave "
            "training_optimizer_name empty, and update them yourself."
        )


def _immutable(model: onnx.ModelProto, rules: Mapping[str, Mapping[int, float]]) -> set[str]:
    """Initializers that are a constant of an operator: ``{op_type: {input position: value}}``."""
    values = {i.name: i for i in model.graph.initializer}
    found = set()
    for node in model.graph.node:
        for position, value in rules.get(node.op_type, {}).items():
            name = node.input[int(position)] if int(position) < len(node.input) else ""
            if name in values:
                array = numpy_helper.to_array(values[name])
                if array.size == 1 and np.float32(array.item()) == np.float32(value):
                    found.add(name)
    return found
