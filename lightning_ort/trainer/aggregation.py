"""Several checkpoint files of one training put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["aggregate"]


def aggregate(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state from those of all ranks of a training with ZeRO.

    With ZeRO stage 1 a rank keeps the optimizer states of its share of all weights, laid end to end; a weight that lies
    across the border of two shares is stored in parts, each flat. ``partition_info`` has the shape of such weights.

    Args:
        states: one per file, in any order.

    Raises:
        AssertionError: the files are not those of ranks 0, 1, 2 and so on of one training.
    """
    ordered = sorted(states, key=lambda state: int(state["trainer_options"]["world_rank"]))
    ranks = [int(state["trainer_options"]["world_rank"]) for state in ordered]
    if ranks != list(range(len(ordered))):
        raise AssertionError(f"Expected the files of ranks 0 to {len(ordered) - 1}, one of each; got ranks {ranks}")
    for key in ("optimizer_name", "world_size", "zero_stage", "mixed_precision"):
        found = {state["trainer_options"][key] for state in ordered}
        if len(found) > 1:
            raise AssertionError(f"The files do not belong together: they differ in {key} ({sorted(map(str, found))})")
    shapes = _shapes(ordered)
    first = dict(ordered[0])
    if "model" in first:
        weights = _joined([state.get("model", {}).get("full_precision", {}) for state in ordered], shapes)
        first["model"] = {"full_precision": weights}
    if "optimizer" in first:
        names = dict.fromkeys(name for state in ordered for name in state.get("optimizer", {}))
        first["optimizer"] = {
            name: _joined([state.get("optimizer", {}).get(name, {}) for state in ordered], shapes, name)
            for name in names
        }
    first.pop("partition_info", None)
    return first


def _shapes(states: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(int(size) for size in info["original_dim"])
        for state in states
        for name, info in state.get("partition_info", {}).items()
    }


def _joined(
    parts: Sequence[Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]], weight: str | None = None
) -> dict[str, Any]:
    """Entries of all parts; those of a weight that was cut are laid end to end and get their shape back."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        arrays = [part[key] for part in parts if key in part]
        shape = shapes.get(weight or key)
        whole = shape is None or len(arrays) == 1 or np.shape(arrays[0]) == shape or key == "Update_Count"
        found[key] = arrays[0] if whole else np.concatenate([np.ravel(a) for a in arrays]).reshape(shape)
    return found
