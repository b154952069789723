"""Weights and optimizer states from a training in torch to one on a device, and back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ort.checkpoints.names import SHARED, moments_from_orttrainer, moments_to_orttrainer
from lightning_ort.checkpoints.state import OptimizerState, TrainingState
from lightning_ort.ondevice.checkpoint import CheckpointState
from lightning_ort.ondevice.exchange_optimizers import optimizer_of_torch, torch_state
from lightning_ort.trainer import ORTTrainer

__all__ = ["copy_from_torch", "copy_to_torch"]


@torch.no_grad()
def copy_to_torch(
    state: CheckpointState | str | os.PathLike[str],
    module: nn.Module | ORTTrainer,
    optimizer: Optimizer | None = None,
) -> None:
    """Take over a training on a device: go on with it in torch.

    Args:
        state: a checkpoint, or its path.
        module: gets parameters and running statistics by name. It may have buffers that the checkpoint lacks, which
            training does not change. An ``ORTTrainer`` gets its optimizer's state as well.
        optimizer: an Adam, AdamW or SGD of torch over the trained parameters, which gets moments, number of updates
            and, in all of its groups, the learning rate.

    Raises:
        FileNotFoundError, ValueError: no such checkpoint; names, shapes or types that differ; a checkpoint without
            the state of such an optimizer. Nothing has been changed then.
        TypeError: ``module`` or ``optimizer`` is something else.
    """
    found = (state if isinstance(state, CheckpointState) else CheckpointState.load_checkpoint(state)).training_state
    _require_values(found)
    if isinstance(module, ORTTrainer):
        _require_none(optimizer)
        module.load_state_dict(_trainer_state(found, module))
        return
    pairs = _pairs(found, module)
    loaded = None if optimizer is None else torch_state(found, optimizer, _parameters(module))
    for tensor, target in pairs:
        target.copy_(tensor)
    if optimizer is not None and loaded is not None:
        optimizer.load_state_dict(loaded)


@torch.no_grad()
def copy_from_torch(state: CheckpointState, module: nn.Module | ORTTrainer, optimizer: Optimizer | None = None) -> None:
    """Let a training on a device go on from where torch is.

    Args:
        state: gets what :func:`copy_to_torch` would hand back: parameters, running statistics, and the state of the
            optimizer if there is one. A :class:`Module` that has it goes on from there at once.
        module: see :func:`copy_to_torch`.
        optimizer: see :func:`copy_to_torch`.

    Raises:
        ValueError: names, shapes or types that differ, another kind of optimizer than that of the checkpoint, or one
            that ``state`` has no place for. Nothing has been changed then.
        TypeError: an argument is something else.
    """
    if not isinstance(state, CheckpointState):
        raise TypeError(f"state is a {type(state).__name__}; expected a CheckpointState.")
    own = state.training_state
    _require_values(own)
    new: OptimizerState | None = None
    if isinstance(module, ORTTrainer):
        _require_none(optimizer)
        new = _optimizer_of_trainer(own, module)
        pairs = _checked(
            own, {n: torch.as_tensor(t) for n, t in module.state_dict()["model"]["full_precision"].items()}
        )
    else:
        pairs = _pairs(own, module)
        if optimizer is not None:
            new = optimizer_of_torch(own, optimizer, _parameters(module))
    if new is not None and own.optimizer is not None:
        _check_kind(own.optimizer, new)
    for target, tensor in pairs:
        target.copy_(tensor)
    if new is not None:
        _replace(own, new)


def _check_kind(old: OptimizerState, new: OptimizerState) -> None:
    """Adam and AdamW remember the same."""
    if old.kind != new.kind and not {old.kind, new.kind} <= {"Adam", "AdamW"}:
        raise ValueError(f"The optimizer is {new.kind}, but the checkpoint's is {old.kind}.")
    differing = [n for n, moments in old.moments.items() if set(moments) != set(new.moments.get(n, {}))]
    if differing:
        raise ValueError(
            f"The checkpoint keeps {sorted(old.moments[differing[0]]) or 'nothing'} per parameter, the optimizer "
            f"{sorted(new.moments.get(differing[0], {})) or 'nothing'}."
        )
    new.kind = old.kind


def _replace(own: TrainingState, new: OptimizerState) -> None:
    """Write into the moments that an optimizer may be using."""
    old = own.optimizer
    if old is None or not old.moments:
        own.optimizer = new
        return
    old.step, old.learning_rate = new.step, new.learning_rate
    for name, moments in old.moments.items():
        for moment, tensor in moments.items():
            tensor.copy_(new.moments[name][moment])


def _require_values(state: TrainingState) -> None:
    if state.nominal:
        raise ValueError("The checkpoint is a nominal one, which has no values.")


def _require_none(optimizer: Optimizer | None) -> None:
    if optimizer is not None:
        raise TypeError("An ORTTrainer has an optimizer of its own; leave out the argument.")


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    names = getattr(module, "parameter_names", {})
    return {names.get(n, n): p for n, p in module.named_parameters()}


def _pairs(state: TrainingState, module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; expected a torch module or an ORTTrainer.")
    # a module made from an ONNX model knows the names that its tensors have there
    names = {**getattr(module, "parameter_names", {}), **getattr(module, "buffer_names", {})}
    tensors: dict[str, Tensor] = {n: p.detach() for n, p in _parameters(module).items()}
    tensors |= {names.get(n, n): b for n, b in module.named_buffers()}
    required = set(_parameters(module))
    missing = sorted(required - set(state.tensors))
    if missing:
        raise ValueError(f"The checkpoint lacks parameters of the module: {', '.join(missing)}.")
    return _checked(state, tensors)


def _checked(state: TrainingState, tensors: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Tensors of the state with those of their names."""
    unknown = sorted(set(state.tensors) - set(tensors))
    if unknown:
        raise ValueError(f"The checkpoint holds {', '.join(unknown)}, which the module does not have.")
    for name, tensor in state.tensors.items():
        other = tensors[name]
        if other.shape != tensor.shape or other.dtype != tensor.dtype:
            raise ValueError(
                f"{name!r} is {tensor.dtype} of shape {list(tensor.shape)} in the checkpoint and {other.dtype} of "
                f"shape {list(other.shape)} in the module."
            )
    return [(tensor, tensors[name]) for name, tensor in state.tensors.items()]


_KINDS = {"AdamOptimizer": ("AdamW",), "LambOptimizer": ("Lamb",), "SGDOptimizer": ("SGD",)}


def _trainer_state(state: TrainingState, trainer: ORTTrainer) -> dict[str, Any]:
    """For ``load_state_dict`` of ``trainer``: weights, moments and counters of ``state``.

    Counters of an ORTTrainer start at 1.

    Raises:
        ValueError: the state of another optimizer, or none.
    """
    own, name = state.optimizer, trainer.optim_config.name
    if own is None or (own.step and own.kind != "SGD" and not own.moments):
        raise ValueError("The checkpoint holds no optimizer state. Save it with include_optimizer_state=True.")
    if own.kind not in _KINDS[name]:
        raise ValueError(f"The checkpoint holds the state of {own.kind}, but the trainer has {name}.")
    if any("momentum" in moments for moments in own.moments.values()):
        raise ValueError("The checkpoint holds a momentum, which ORTTrainer's SGD does not have.")
    found = trainer.state_dict()
    weights = dict(found["model"]["full_precision"])
    unknown = sorted(set(state.tensors) - set(weights))
    if unknown:
        raise ValueError(f"The checkpoint holds {', '.join(unknown)}, which the trainer does not have.")
    weights |= {n: t.numpy().copy() for n, t in state.tensors.items()}
    moments = {w: {s: t.numpy().copy() for s, t in m.items()} for w, m in own.moments.items()}
    optimizer = moments_to_orttrainer(name, moments, dict.fromkeys(own.moments, own.step + 1))
    info = {"optimization_step": own.step, "step": own.step}
    return found | {"model": {"full_precision": weights}, "optimizer": optimizer, "train_step_info": info}


def _optimizer_of_trainer(state: TrainingState, trainer: ORTTrainer) -> OptimizerState:
    """What the optimizer of ``trainer`` remembers.

    Raises:
        ValueError: it trains other parameters than ``state``, or has updated them a different number of times.
    """
    found, name = trainer.state_dict()["optimizer"], trainer.optim_config.name
    (kind,) = _KINDS[name]
    own = OptimizerState(kind, trainer.optim_config.lr)
    info = trainer.state_dict()["train_step_info"]
    if kind == "SGD":
        own.step, own.moments = info["optimization_step"], {n: {} for n in state.trained}
        return own
    weights = {n: moments_from_orttrainer(v) for n, v in found.items() if n != SHARED}
    if set(weights) != set(state.trained):
        raise ValueError(
            f"The trainer trains {', '.join(sorted(weights))}; the checkpoint {', '.join(sorted(state.trained))}."
        )
    own.moments = {n: {s: torch.as_tensor(value).clone() for s, value in weights[n][0].items()} for n in state.trained}
    shared = moments_from_orttrainer(found.get(SHARED, {}))[1]
    distinct = {(count if shared is None else shared) or 0 for _, count in weights.values()}
    if len(distinct) != 1:
        raise ValueError(f"The weights were updated {sorted(distinct)} times; a device counts all of them as one.")
    own.step = distinct.pop() - 1
    return own
