"""Which weight of an ORTTrainer is which of a LightningModule, and what each calls the moments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ort.errors import CheckpointError
from lightning_ort.optim.kinds import ORTTRAINER_STATES, TORCH_STATES, kind_of, odd_setting
from lightning_ort.validation import listed

__all__ = [
    "SHARED",
    "find_prefix",
    "from_moments",
    "moments_from_orttrainer",
    "moments_to_orttrainer",
    "orttrainer_kind_of",
    "to_moments",
    "without_moments",
]


def find_prefix(inner: Collection[str], outer: Collection[str], prefix: str | None, where: str) -> str:
    """What to put before each name of ``inner`` to have names of ``outer``.

    A LightningModule whose attribute ``net`` is what an ORTTrainer trains has the trainer's names after ``net.``.

    Args:
        inner: the trainer's names.
        outer: the LightningModule's names.
        prefix: what the user has said; ``None`` to find it.
        where: which file and which direction, for messages.

    Returns:
        An empty string if the names are the same.

    Raises:
        CheckpointError: no prefix gives every name, or several do.
    """
    outside = set(outer)
    if prefix is not None:
        missing = [name for name in inner if prefix + name not in outside]
        if missing:
            raise CheckpointError(f"{where}: with prefix={prefix!r} these have no counterpart: {listed(missing)}.")
        return prefix
    if all(name in outside for name in inner):
        return ""
    # each prefix that fits must give the first name
    first = next(iter(inner))
    candidates = [name[: -len(first)] for name in outer if name.endswith(f".{first}")]
    fitting = [p for p in candidates if all(p + name in outside for name in inner)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise CheckpointError(
            f"{where}: the names fit after each of {', '.join(map(repr, fitting))}. Say which is meant by prefix=..."
        )
    best = min([*candidates, ""], key=lambda p: sum(p + name not in outside for name in inner))
    missing = [name for name in inner if best + name not in outside]
    after = f" after {best!r}" if best else ""
    raise CheckpointError(
        f"{where}: {len(missing)} of {len(inner)} weights of the ORTTrainer have no counterpart{after}: "
        f"{listed(missing)}. The LightningModule has {listed(outer)}."
    )


SHARED = "shared_optimizer_state"
"""where LAMB keeps the counter that all weights share"""

_COUNT, _SHARED_COUNTS = "Update_Count", ("Step", "step")
_ORTTRAINER = {"SGD": "SGDOptimizer", "Adam": "AdamOptimizer", "AdamW": "AdamOptimizer", "Lamb": "LambOptimizer"}


def orttrainer_kind_of(optimizer: Optimizer) -> tuple[str, str]:
    """Find what ORTTrainer calls an optimizer with these states.

    Returns:
        The name, and an empty string; or an empty string, and why it has none.
    """
    title = type(optimizer).__name__
    kind = kind_of(optimizer)
    if kind is None:
        return "", f"{title} has no counterpart among AdamConfig, LambConfig and SGDConfig"
    if odd := odd_setting(optimizer, {"momentum": 0}):
        return (
            "",
            f"{title} with {odd.name}={odd.value!r} has no counterpart among AdamConfig, LambConfig and SGDConfig",
        )
    return _ORTTRAINER[kind], ""


def moments_to_orttrainer(
    kind: str, moments: Mapping[str, Mapping[str, Any]], counts: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Write states under ORTTrainer's names.

    Args:
        kind: as of :func:`orttrainer_kind_of`.
        moments: weight name to its states, by the names of the rules.
        counts: weight name to the number of its next update, from 1.
    """
    if kind == "SGDOptimizer":
        return {}
    states = {w: {ORTTRAINER_STATES[s]: value for s, value in values.items()} for w, values in moments.items()}
    if kind == "LambOptimizer":
        states[SHARED] = {_SHARED_COUNTS[0]: np.array([max(counts.values(), default=1)])}
    else:
        for weight, values in states.items():
            values[_COUNT] = np.array([counts[weight]])
    return states


def moments_from_orttrainer(values: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    """Read the states of one weight, or what all share, by the names of the rules; and the counter, if there is one."""
    moments = {state: values[name] for state, name in ORTTRAINER_STATES.items() if name in values}
    for name in (_COUNT, *_SHARED_COUNTS):
        if name in values:
            return moments, int(np.ravel(values[name])[0])
    return moments, None


def to_moments(kind: str, states: Mapping[str, Mapping[str, Any]], like: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write torch's states as the ``optimizer`` part of an ORTTrainer's state.

    Args:
        kind: as of :func:`orttrainer_kind_of`.
        states: weight name to torch's state, empty for a parameter that was never updated.
        like: weight name to the weight.

    Raises:
        ValueError: LAMB, and the weights were updated different numbers of times.
    """
    counts = {name: int(state.get("step", 0)) + 1 for name, state in states.items()}
    if kind == "LambOptimizer" and len(set(counts.values())) > 1:
        raise ValueError(
            "LAMB of ORTTrainer has one step count for all weights, but here they were updated "
            f"{sorted(n - 1 for n in set(counts.values()))} times."
        )
    moments = {
        name: {
            s: state[t].detach().cpu() if t in state else torch.zeros(like[name].shape, dtype=like[name].dtype)
            for s, t in _TORCH.items()
        }
        for name, state in states.items()
    }
    return moments_to_orttrainer(kind, moments, counts)


def from_moments(optimizer: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """Read torch's state of a weight; empty if it was never updated, or has no state in ``optimizer``."""
    moments, count = moments_from_orttrainer(optimizer.get(name, {}))
    if count is None:
        count = moments_from_orttrainer(optimizer.get(SHARED, {}))[1]
    if not moments or count is None or count <= 1:
        return {}
    return {"step": torch.tensor(float(count) - 1)} | {_TORCH[s]: torch.as_tensor(v) for s, v in moments.items()}


def without_moments(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what torch keeps of a weight beyond what ORTTrainer keeps."""
    return {key: value for key, value in state.items() if key not in ("step", *_TORCH.values())}


_TORCH = {state: TORCH_STATES[state] for state in ORTTRAINER_STATES}
