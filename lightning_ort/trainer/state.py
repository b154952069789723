"""The state of a trainer as nested dictionaries, in the layout of ONNX Runtime's ORTTrainer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_ort.scalers import StepScalerRule

if TYPE_CHECKING:
    from lightning_ort.trainer.trainer import ORTTrainer

__all__ = ["check_state", "load_state", "make_state", "trainer_options", "weights_of"]


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tensor that has two names occurs once, under the first."""
    # a module made from an ONNX model knows the names that its weights have there
    names = {**getattr(module, "parameter_names", {}), **getattr(module, "buffer_names", {})}
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            found[names.get(name, name)] = tensor
    return found


def trainer_options(trainer: ORTTrainer) -> dict[str, Any]:
    """What a checkpoint tells about the options."""
    distributed = trainer.options.distributed
    return {
        "mixed_precision": trainer.options.mixed_precision.enabled,
        "zero_stage": distributed.deepspeed_zero_optimization.stage,
        "world_rank": distributed.world_rank,
        "world_size": distributed.world_size,
        "optimizer_name": trainer.optim_config.name,
        "data_parallel_size": distributed.data_parallel_size,
        "horizontal_parallel_size": distributed.horizontal_parallel_size,
    }


def make_state(trainer: ORTTrainer) -> dict[str, Any]:
    """Copies of all that makes up the state, as numpy arrays and numbers."""
    info = trainer._train_step_info
    scaler = {} if trainer._scaler is None else {"loss_scaler": _scaler_state(trainer)}
    return {
        "model": {"full_precision": {n: _array(t) for n, t in trainer._weights.items()}},
        "optimizer": trainer._optimizer.state(),
        "trainer_options": trainer_options(trainer),
        "train_step_info": {"optimization_step": info.optimization_step, "step": info.step},
        **scaler,
    }


def _scaler_state(trainer: ORTTrainer) -> dict[str, Any]:
    return {**StepScalerRule(trainer._scaler).summary(), "skipped_steps": trainer._skipped}


def _array(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu()
    # bfloat16 has no numpy type
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()


def check_state(trainer: ORTTrainer, state: Any, *, strict: bool) -> None:
    """Raise if ``state`` cannot be loaded; nothing is changed.

    Raises:
        TypeError: it is no dictionary.
        RuntimeError: with ``strict``, keys that are missing or unexpected; a shape that is not the trainer's.
        AssertionError: the state of another optimizer.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"'state_dict' must be a dict, not {type(state).__name__}")
    weights = state.get("model", {}).get("full_precision", {})
    if "model" in state:
        _compare_keys(weights, trainer._weights, "state_dict[model][full_precision]", strict)
    for name, value in weights.items():
        if name in trainer._weights:
            _compare_shapes(value, trainer._weights[name], f"state_dict[model][full_precision][{name}]")
    if "optimizer" in state:
        own, given = trainer._optimizer.state(), state["optimizer"]
        # an older file may have a step per weight and none that is shared, or the reverse
        _compare_keys(given, own, "state_dict[optimizer]", strict, {"shared_optimizer_state"})
        for name, values in given.items():
            if name not in own or name == "shared_optimizer_state":
                continue
            where = f"state_dict[optimizer][{name}]"
            _compare_keys(values, own[name], where, strict, {"Update_Count"} if not given.get(name) else set())
            for key in values.keys() & own[name].keys():
                _compare_shapes(values[key], own[name][key], f"{where}[{key}]")
    theirs = state.get("trainer_options", {}).get("optimizer_name", trainer.optim_config.name)
    if "optimizer" in state and theirs != trainer.optim_config.name:
        raise AssertionError(f"Optimizer mismatch: expected {trainer.optim_config.name}, got {theirs}")
    if strict and "model" not in state:
        warnings.warn("Missing key: model in state_dict", UserWarning, stacklevel=4)
    if strict and "optimizer" not in state:
        warnings.warn("Missing key: optimizer in state_dict", UserWarning, stacklevel=4)
    if "train_step_info" not in state:
        warnings.warn("Missing key: train_step_info in state_dict", UserWarning, stacklevel=4)


def _compare_keys(
    given: Mapping[str, Any], own: Mapping[str, Any], where: str, strict: bool, optional: set[str] | None = None
) -> None:
    if not strict:
        return
    missing = [key for key in own if key not in given and key not in (optional or ())]
    unexpected = [key for key in given if key not in own and key not in (optional or ())]
    problems = [f"{what} keys: {keys}" for what, keys in (("Missing", missing), ("Unexpected", unexpected)) if keys]
    if problems:
        raise RuntimeError(f"{'; '.join(problems)} in {where}")


def _compare_shapes(given: Any, own: Any, where: str) -> None:
    if tuple(np.shape(given)) != tuple(own.shape):
        raise RuntimeError(f"{where} has shape {list(np.shape(given))}; expected {list(own.shape)}")


@torch.no_grad()
def load_state(trainer: ORTTrainer, state: Mapping[str, Any]) -> None:
    """Take over a state that :func:`check_state` found in order."""
    if trainer._scaler is not None and "loss_scaler" in state:
        # first, for what it refuses is only known when it is asked
        StepScalerRule(trainer._scaler).resume(state["loss_scaler"])
        trainer._skipped = int(state["loss_scaler"]["skipped_steps"])
    for name, value in state.get("model", {}).get("full_precision", {}).items():
        if name in trainer._weights:
            trainer._weights[name].copy_(torch.as_tensor(value))
    trainer._optimizer.load(state.get("optimizer", {}))
    info = state.get("train_step_info", {})
    own = trainer._train_step_info
    own.optimization_step = int(info.get("optimization_step", own.optimization_step))
    own.step = int(info.get("step", own.step))
