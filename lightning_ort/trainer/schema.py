"""Keys, types and defaults of the options, for cerberus."""

from __future__ import annotations

import enum
from typing import Any

import cerberus
import onnxruntime

from lightning_ort.amp import LossScaler
from lightning_ort.optim.lr_scheduler import _LRScheduler

__all__ = ["SCHEMA", "OptionsValidator", "PropagateCastOpsStrategy"]


class PropagateCastOpsStrategy(enum.Enum):
    """How ONNX Runtime's training build moves casts through a float16 graph; see ``docs/orttrainer.md``."""

    NONE = 0
    INSERT_AND_REDUCE = 1
    FLOOD_FILL = 2


def _strategies() -> tuple[type, ...]:
    theirs = getattr(getattr(onnxruntime.capi, "_pybind_state", None), "PropagateCastOpsStrategy", None)
    return (PropagateCastOpsStrategy,) if theirs is None else (PropagateCastOpsStrategy, theirs)


class OptionsValidator(cerberus.Validator):
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
    "placement": {"type": "string", "allowed": ["fastest", "onnxruntime"], "default": "fastest"},
}  # fmt: skip
