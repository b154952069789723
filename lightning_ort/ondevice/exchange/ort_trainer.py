"""The state of an ORTTrainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lightning_ort.ondevice.state import OptimizerState, TrainingState
from lightning_ort.trainer import ORTTrainer

__all__ = ["optimizer_of_trainer", "trainer_state"]

_KINDS = {"AdamOptimizer": ("AdamW",), "LambOptimizer": ("Lamb",), "SGDOptimizer": ("SGD",)}
_MOMENTS = {"moment_1": "Moment_1", "moment_2": "Moment_2"}
_SHARED = "shared_optimizer_state"


def trainer_state(state: TrainingState, trainer: ORTTrainer) -> dict[str, Any]:
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
    optimizer: dict[str, Any] = {}
    count = np.array([own.step + 1])
    for weight, moments in own.moments.items() if own.kind != "SGD" else ():
        optimizer[weight] = {_MOMENTS[m]: t.numpy().copy() for m, t in moments.items()}
        if name == "AdamOptimizer":
            optimizer[weight]["Update_Count"] = count
    if name == "LambOptimizer":
        optimizer[_SHARED] = {"Step": count}
    info = {"optimization_step": own.step, "step": own.step}
    return found | {"model": {"full_precision": weights}, "optimizer": optimizer, "train_step_info": info}


def optimizer_of_trainer(state: TrainingState, trainer: ORTTrainer) -> OptimizerState:
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
    weights = {n: v for n, v in found.items() if n != _SHARED}
    if set(weights) != set(state.trained):
        raise ValueError(
            f"The trainer trains {', '.join(sorted(weights))}; the checkpoint {', '.join(sorted(state.trained))}."
        )
    own.moments = {
        n: {m: torch.as_tensor(weights[n][key]).clone() for m, key in _MOMENTS.items()} for n in state.trained
    }
    counts = found[_SHARED]["Step"] if name == "LambOptimizer" else [v["Update_Count"] for v in weights.values()]
    distinct = {int(c) for c in np.concatenate([np.reshape(c, -1) for c in counts])}
    if len(distinct) != 1:
        raise ValueError(f"The weights were updated {sorted(distinct)} times; a device counts all of them as one.")
    own.step = distinct.pop() - 1
    return own
