"""What a TrainingSession is told: the properties of the reference page, each checked."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

__all__ = ["TrainingParameters"]

_ONE_PROCESS = "a TrainingSession trains in one process"
_OWN_MEMORY = "activations are freed as early as eager frees them, and none is computed twice"
_FP16 = "it computes in the element types of the ONNX file; convert the file, or set loss_scale for a float16 file"

# name: (default, why another value is refused; None where it has an effect)
_PROPERTIES: dict[str, tuple[Any, str | None]] = {
    "allreduce_post_accumulation": (False, _ONE_PROCESS),
    "attn_dropout_recompute": (False, _OWN_MEMORY),
    "data_parallel_size": (1, _ONE_PROCESS),
    "deepspeed_zero_stage": (0, _ONE_PROCESS),
    "enable_adasum": (False, _ONE_PROCESS),
    "enable_grad_norm_clip": (True, None),
    "gelu_recompute": (False, _OWN_MEMORY),
    "gradient_accumulation_steps": (1, None),
    "horizontal_parallel_size": (1, _ONE_PROCESS),
    "immutable_weights": ({}, None),
    "loss_output_name": ("", None),
    "loss_scale": (0.0, None),
    "lr_params_feed_name": ("Learning_Rate", None),
    "model_after_graph_transforms_path": ("", None),
    "model_with_gradient_graph_path": ("", None),
    "model_with_training_graph_path": ("", None),
    "num_pipeline_micro_batches": (1, _ONE_PROCESS),
    "number_recompute_layers": (0, _OWN_MEMORY),
    "optimizer_attributes_map": ({}, None),
    "optimizer_int_attributes_map": ({}, None),
    "pipeline_cut_info_string": ("", _ONE_PROCESS),
    "pipeline_parallel_size": (1, _ONE_PROCESS),
    "propagate_cast_ops_allow": ([], "casts stay where the ONNX file has them"),
    "propagate_cast_ops_level": (-1, "casts stay where the ONNX file has them"),
    "set_gradients_as_graph_outputs": (False, None),
    "sliced_axes": ({}, _ONE_PROCESS),
    "sliced_schema": ({}, _ONE_PROCESS),
    "sliced_tensor_names": ([], _ONE_PROCESS),
    "training_optimizer_name": ("", None),
    "transformer_layer_recompute": (False, _OWN_MEMORY),
    "use_fp16_moments": (False, "moments have the element type of their weight"),
    "use_memory_efficient_gradient": (False, _OWN_MEMORY),
    "use_mixed_precision": (False, _FP16),
    "weights_not_to_train": (set(), None),
    "weights_to_train": (set(), None),
    "world_rank": (0, _ONE_PROCESS),
    "world_size": (1, _ONE_PROCESS),
}
_NUMBERS = (int, float)


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
        right = isinstance(value, _NUMBERS) and not isinstance(value, bool)
    elif isinstance(default, int):
        right = isinstance(value, int) and not isinstance(value, bool)
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
    if name == "loss_scale" and not 0 <= value < float("inf"):
        raise ValueError(f"TrainingParameters.loss_scale must be 0 (none) or a positive number, not {value}.")
    return copy.deepcopy(type(default)(value)) if not isinstance(default, bool) else value
