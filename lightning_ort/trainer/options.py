"""Options of an ORTTrainer."""

from __future__ import annotations

import copy
import enum
import inspect
import os
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import cerberus
import onnx
import onnxruntime
from torch import nn

from lightning_ort import validation
from lightning_ort.amp import LossScaler
from lightning_ort.optim.config import _OptimizerConfig
from lightning_ort.optim.lr_scheduler import _LRScheduler
from lightning_ort.runtime.config import Placement
from lightning_ort.validation import shown

__all__ = [
    "REFUSED",
    "SCHEMA",
    "ORTTrainerOptions",
    "PropagateCastOpsStrategy",
    "check_arguments",
    "refuse",
]

# dictionaries whose keys are the user's
_DATA = {"provider_options", "sliced_schema", "sliced_axes"}


class _Section:
    """One level of the options, read by attributes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            nested = isinstance(value, dict) and key not in _DATA
            setattr(self, key, _Section(value) if nested else value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"options have no {name!r} here; there are {', '.join(self._items())}.")

    def _items(self) -> dict[str, Any]:
        return {
            k: v._items() if isinstance(v, _Section) else v for k, v in vars(self).items() if not k.startswith("__")
        }

    def __repr__(self) -> str:
        return repr(self._items())


class ORTTrainerOptions(_Section):
    """Settings of an :class:`~lightning_ort.ORTTrainer`, read by attributes: ``options.mixed_precision.enabled``.

    Every key has an effect or is refused when a trainer is made; ``docs/orttrainer.md`` has the table.

    Args:
        options: nested dictionary of what shall differ from the defaults.

    Raises:
        TypeError: it is no dictionary.
        ValueError: an unknown key, or a value that the key does not take.
    """

    def __init__(self, options: Mapping[str, Any] = {}) -> None:
        try:
            given = dict(options)
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"options={shown(options)}: expected a dictionary, such as {{'device': {{'id': 'cpu'}}}}; without an "
                f"argument all options have their defaults ({error})."
            ) from None
        validator = _OptionsValidator(SCHEMA)
        validated = validator.validated(given)
        if validated is None:
            _make_copyable(validator._errors)
            raise ValueError(f"Invalid options: {validator.errors}")
        super().__init__({key: validated[key] for key in SCHEMA})
        self.__given = frozenset(_paths(given))

    def _was_given(self, path: str) -> bool:
        """Whether the user set the key of that dotted path, and not the defaults."""
        return path in self.__given

    def _items(self) -> dict[str, Any]:
        return {key: value for key, value in super()._items().items() if key in SCHEMA}


def _make_copyable(errors: Any) -> None:
    """Replace values by words where cerberus, which copies them to make its messages, could not copy them."""
    for error in errors:
        try:
            copy.deepcopy(error.value)
        except Exception:
            error.value = shown(error.value)
        _make_copyable(error.child_errors or ())


def _paths(options: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in options.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")


class PropagateCastOpsStrategy(enum.Enum):
    """How ONNX Runtime's training build moves casts through a float16 graph; see ``docs/orttrainer.md``."""

    NONE = 0
    INSERT_AND_REDUCE = 1
    FLOOD_FILL = 2


def _strategies() -> tuple[type, ...]:
    theirs = getattr(getattr(onnxruntime.capi, "_pybind_state", None), "PropagateCastOpsStrategy", None)
    return (PropagateCastOpsStrategy,) if theirs is None else (PropagateCastOpsStrategy, theirs)


class _OptionsValidator(cerberus.Validator):
    """cerberus with the types of this package."""

    types_mapping = cerberus.Validator.types_mapping.copy()
    types_mapping["lr_scheduler"] = cerberus.TypeDefinition("lr_scheduler", (_LRScheduler,), ())
    types_mapping["loss_scaler"] = cerberus.TypeDefinition("loss_scaler", (LossScaler,), ())
    types_mapping["session_options"] = cerberus.TypeDefinition("session_options", (onnxruntime.SessionOptions,), ())
    types_mapping["propagate_cast_ops_strategy"] = cerberus.TypeDefinition(
        "propagate_cast_ops_strategy", _strategies(), ()
    )

    def _check_with_callable_or_none(self, field: str, value: Any) -> None:
        if value is not None and not callable(value):
            self._error(field, "Must be callable or None")


def _section(**keys: Any) -> dict[str, Any]:
    return {"type": "dict", "required": False, "default_setter": lambda _: {}, "schema": keys}


def _integer(default: int, smallest: int, largest: int | None = None) -> dict[str, Any]:
    limits = {"min": smallest} | ({} if largest is None else {"max": largest})
    return {"type": "integer", "default": default, **limits}


def _boolean(default: bool) -> dict[str, Any]:
    return {"type": "boolean", "default": default}


def _string(default: str) -> dict[str, Any]:
    return {"type": "string", "default": default}


def _list(**items: Any) -> dict[str, Any]:
    return {"type": "list", "default_setter": lambda _: [], **({"schema": items} if items else {})}


def _mapping(**values: Any) -> dict[str, Any]:
    return {
        "type": "dict", "default_setter": lambda _: {}, "keysrules": {"type": "string"}, "valuesrules": values,
    }  # fmt: skip


SCHEMA: dict[str, Any] = {
    "batch": _section(gradient_accumulation_steps=_integer(1, 1)),
    "device": _section(id=_string("cuda"), mem_limit=_integer(0, 0)),
    "distributed": _section(
        world_rank=_integer(0, 0),
        world_size=_integer(1, 1),
        local_rank=_integer(0, 0),
        data_parallel_size=_integer(1, 1),
        horizontal_parallel_size=_integer(1, 1),
        pipeline_parallel=_section(
            pipeline_parallel_size=_integer(1, 1),
            num_pipeline_micro_batches=_integer(1, 1),
            pipeline_cut_info_string=_string(""),
            sliced_schema=_mapping(type="list", schema={"type": "integer"}),
            sliced_axes=_mapping(type="integer"),
            sliced_tensor_names=_list(type="string"),
        ),
        allreduce_post_accumulation=_boolean(False),
        deepspeed_zero_optimization=_section(stage=_integer(0, 0, 1)),
        enable_adasum=_boolean(False),
    ),
    "lr_scheduler": {"type": "lr_scheduler", "nullable": True, "default": None},
    "mixed_precision": _section(
        enabled=_boolean(False), loss_scaler={"type": "loss_scaler", "nullable": True, "default": None}
    ),
    "graph_transformer": _section(
        attn_dropout_recompute=_boolean(False),
        gelu_recompute=_boolean(False),
        transformer_layer_recompute=_boolean(False),
        number_recompute_layers=_integer(0, 0),
        allow_layer_norm_mod_precision=_boolean(False),
        propagate_cast_ops_config=_section(
            strategy={"type": "propagate_cast_ops_strategy", "default": PropagateCastOpsStrategy.FLOOD_FILL},
            level=_integer(1, -1),
            allow=_list(type="string"),
        ),
    ),
    "utils": _section(
        frozen_weights=_list(),
        grad_norm_clip=_boolean(True),
        memory_efficient_gradient=_boolean(False),
        run_symbolic_shape_infer=_boolean(False),
    ),
    "debug": _section(
        deterministic_compute=_boolean(False),
        check_model_export=_boolean(False),
        graph_save_paths=_section(
            model_after_graph_transforms_path=_string(""),
            model_with_gradient_graph_path=_string(""),
            model_with_training_graph_path=_string(""),
            model_with_training_graph_after_optimization_path=_string(""),
        ),
    ),
    "_internal_use": _section(
        enable_internal_postprocess=_boolean(True),
        extra_postprocess={"check_with": "callable_or_none", "nullable": True, "default": None},
        onnx_opset_version=_integer(14, 12, 14),
        enable_onnx_contrib_ops=_boolean(True),
    ),
    "provider_options": {"type": "dict", "required": False, "default_setter": lambda _: {}, "schema": {},
                         "allow_unknown": True},
    "session_options": {"type": "session_options", "nullable": True, "default": None},
    "placement": {"type": "string", "allowed": list(get_args(Placement)), "default": "fastest"},
}  # fmt: skip


_CUT = "the graph of a step is not cut into stages or slices: every process trains a copy of the whole model"
_KEPT = (
    "activations are kept as autograd keeps them; to compute some again, use torch.utils.checkpoint in the model, "
    "which is compiled with it"
)
_CASTS = "casts are placed by torch.autocast; ONNX Runtime 1.16 checked this key and did nothing with it"

REFUSED: dict[str, str] = {
    "distributed.horizontal_parallel_size": _CUT,
    "distributed.pipeline_parallel.pipeline_parallel_size": _CUT,
    "distributed.pipeline_parallel.num_pipeline_micro_batches": _CUT,
    "distributed.pipeline_parallel.pipeline_cut_info_string": _CUT,
    "distributed.pipeline_parallel.sliced_schema": _CUT,
    "distributed.pipeline_parallel.sliced_axes": _CUT,
    "distributed.pipeline_parallel.sliced_tensor_names": _CUT,
    "graph_transformer.attn_dropout_recompute": _KEPT,
    "graph_transformer.gelu_recompute": _KEPT,
    "graph_transformer.transformer_layer_recompute": _KEPT,
    "graph_transformer.number_recompute_layers": _KEPT,
    "graph_transformer.allow_layer_norm_mod_precision": "layer norms are computed as torch.autocast asks, in float32",
    "graph_transformer.propagate_cast_ops_config.strategy": _CASTS,
    "graph_transformer.propagate_cast_ops_config.level": _CASTS,
    "graph_transformer.propagate_cast_ops_config.allow": _CASTS,
}
"""Dotted path to the reason why only the default is taken."""


def check_arguments(model: Any, optim_config: Any, loss_fn: Any, options: Any) -> None:
    """Raise if an argument of ``ORTTrainer`` is of another kind than described there.

    Raises:
        ValueError: the model.
        AssertionError: another argument, or there is no model.
    """
    if model is None:
        raise AssertionError("'model' is required and must be either a 'torch.nn.Module' or ONNX model")
    if not isinstance(model, (nn.Module, onnx.ModelProto)):
        raise ValueError(f"'model' must be either 'torch.nn.Module' or 'onnx.ModelProto', not {type(model).__name__}")
    if not isinstance(optim_config, _OptimizerConfig):
        raise AssertionError("'optim_config' is required and must be any of 'AdamConfig', 'LambConfig' or 'SGDConfig'")
    if loss_fn is not None and not (callable(loss_fn) and _parameters(loss_fn) == 2):
        raise AssertionError("'loss_fn' must be either 'None' or a callable with two parameters")
    if options is not None and not isinstance(options, ORTTrainerOptions):
        raise AssertionError("'options' must be either 'None' or 'ORTTrainerOptions'")


def _parameters(function: Any) -> int:
    try:
        return len(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # built in, and says nothing of its parameters
        return -1


def refuse(options: ORTTrainerOptions) -> None:
    """Raise if an option is set that has no effect here, or a path that cannot be written.

    Raises:
        NotImplementedError: names the option, its value and the reason.
        ValueError: the folder of a file does not exist.
    """
    for key, path in vars(options.debug.graph_save_paths).items():
        if path:
            validation.path(f"options['debug.graph_save_paths.{key}']", path)
        if path and not os.path.isdir(os.path.dirname(path) or "."):
            raise ValueError(f"options['debug.graph_save_paths.{key}'] = {path!r}: the folder does not exist.")
    for path, reason in REFUSED.items():
        value, default = _value(options, path), _default(path)
        if value != default and getattr(value, "name", value) != getattr(default, "name", default):
            raise NotImplementedError(
                f"options[{path!r}] = {value!r} is not supported: {reason}. Leave it at its default, {default!r}."
            )


def _value(options: Any, path: str) -> Any:
    for key in path.split("."):
        options = getattr(options, key)
    return options


def _default(path: str) -> Any:
    *sections, key = path.split(".")
    schema: Any = SCHEMA
    for section in sections:
        schema = schema[section]["schema"]
    entry = schema[key]
    return entry["default"] if "default" in entry else entry["default_setter"](None)
