"""What a trainer cannot be made of: arguments of another kind, and options that are not carried out."""

from __future__ import annotations

import inspect
from typing import Any

import onnx
from torch import nn

from lightning_ort.optim.config import _OptimizerConfig
from lightning_ort.trainer.options import ORTTrainerOptions
from lightning_ort.trainer.schema import SCHEMA

__all__ = ["REFUSED", "check_arguments", "refuse"]

_ONE = "training runs in one process on one device"
_CUT = "the graph of a step is not cut into stages or slices"
_KEPT = (
    "activations are kept as autograd keeps them; to compute some again, use torch.utils.checkpoint in the model, "
    "which is compiled with it"
)
_CASTS = "casts are placed by torch.autocast; ONNX Runtime 1.16 checked this key and did nothing with it"

REFUSED: dict[str, str] = {
    "distributed.world_rank": _ONE,
    "distributed.world_size": _ONE,
    "distributed.local_rank": _ONE,
    "distributed.data_parallel_size": _ONE,
    "distributed.horizontal_parallel_size": _ONE,
    "distributed.pipeline_parallel.pipeline_parallel_size": _CUT,
    "distributed.pipeline_parallel.num_pipeline_micro_batches": _CUT,
    "distributed.pipeline_parallel.pipeline_cut_info_string": _CUT,
    "distributed.pipeline_parallel.sliced_schema": _CUT,
    "distributed.pipeline_parallel.sliced_axes": _CUT,
    "distributed.pipeline_parallel.sliced_tensor_names": _CUT,
    "distributed.allreduce_post_accumulation": f"{_ONE}, where nothing is reduced",
    "distributed.deepspeed_zero_optimization.stage": f"{_ONE}, where there is nothing to partition",
    "distributed.enable_adasum": f"{_ONE}, where nothing is reduced",
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
    if loss_fn is not None and not (callable(loss_fn) and len(inspect.signature(loss_fn).parameters) == 2):
        raise AssertionError("'loss_fn' must be either 'None' or a callable with two parameters")
    if options is not None and not isinstance(options, ORTTrainerOptions):
        raise AssertionError("'options' must be either 'None' or 'ORTTrainerOptions'")


def refuse(options: ORTTrainerOptions) -> None:
    """Raise if an option is set that has no effect here.

    Raises:
        NotImplementedError: names the option, its value and the reason.
    """
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
