"""Optimizer states of torch as those of ORTTrainer, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["from_moments", "kind_of", "to_moments", "without_moments"]

_MOMENTS = {"Moment_1": "exp_avg", "Moment_2": "exp_avg_sq"}
_SHARED = "shared_optimizer_state"


def kind_of(optimizer: Optimizer) -> tuple[str, str]:
    """What ORTTrainer calls an optimizer with these states.

    Returns:
        The name, and an empty string; or an empty string, and why it has none.
    """
    # they are torch optimizers, and importing them costs nothing more than torch
    from lightning_ort.optim.adam_like import AdamLike
    from lightning_ort.optim.lamb import Lamb

    title = type(optimizer).__name__
    if isinstance(optimizer, Lamb):
        return "LambOptimizer", ""
    if isinstance(optimizer, (torch.optim.Adam, AdamLike)):
        if any(group.get("amsgrad") for group in optimizer.param_groups):
            return "", f"{title} with amsgrad=True has a third moment"
        return "AdamOptimizer", ""
    if type(optimizer) is torch.optim.SGD:
        if any(group["momentum"] != 0 for group in optimizer.param_groups):
            return "", "SGD with momentum has a state, and SGDConfig none"
        return "SGDOptimizer", ""
    return "", f"{title} has no counterpart among AdamConfig, LambConfig and SGDConfig"


def to_moments(kind: str, states: Mapping[str, Mapping[str, Any]], like: Mapping[str, Tensor]) -> dict[str, Any]:
    """The ``optimizer`` part of an ORTTrainer's state.

    Args:
        kind: as of :func:`kind_of`.
        states: weight name to torch's state, empty for a parameter that was never updated.
        like: weight name to the weight.

    Raises:
        ValueError: LAMB, and the weights were updated different numbers of times.
    """
    if kind == "SGDOptimizer":
        return {}
    found: dict[str, Any] = {}
    counts = {}
    for name, state in states.items():
        counts[name] = int(state.get("step", 0)) + 1
        found[name] = {
            moment: state[key].detach().cpu() if key in state else torch.zeros(like[name].shape, dtype=like[name].dtype)
            for moment, key in _MOMENTS.items()
        }
        if kind == "AdamOptimizer":
            found[name]["Update_Count"] = np.array([counts[name]])
    if kind == "LambOptimizer":
        if len(set(counts.values())) > 1:
            raise ValueError(
                "LAMB of ORTTrainer has one step count for all weights, but here they were updated "
                f"{sorted(n - 1 for n in set(counts.values()))} times."
            )
        found[_SHARED] = {"Step": np.array([max(counts.values(), default=1)])}
    return found


def from_moments(optimizer: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """torch's state of a weight; empty if it was never updated, or has no state in ``optimizer``."""
    values = optimizer.get(name, {})
    shared = optimizer.get(_SHARED, {})
    counter = values.get("Update_Count", shared.get("Step", shared.get("step")))
    if not values or counter is None or int(np.ravel(counter)[0]) <= 1:
        return {}
    state = {"step": torch.tensor(float(np.ravel(counter)[0]) - 1)}
    return state | {key: torch.as_tensor(values[moment]) for moment, key in _MOMENTS.items()}


def without_moments(state: Mapping[str, Any]) -> dict[str, Any]:
    """What torch keeps of a weight beyond what ORTTrainer keeps."""
    return {key: value for key, value in state.items() if key not in ("step", *_MOMENTS.values())}
