"""A Lightning checkpoint as the state of an ORTTrainer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from lightning_ort.checkpoints.moments import to_moments, without_moments
from lightning_ort.checkpoints.names import find_prefix
from lightning_ort.checkpoints.record import RECORD, weights_key
from lightning_ort.errors import CheckpointError

__all__ = ["to_trainer"]


def to_trainer(
    checkpoint: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    trained: Collection[str],
    prefix: str | None,
    path: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """State of an ORTTrainer, and what else the checkpoint holds.

    Args:
        checkpoint: of a run under ``strategy="ort"``.
        weights: the trainer's, by name.
        trained: names of those that it trains.
        prefix: see :func:`find_prefix`.
        path: of the file, for messages.

    Returns:
        The state, as of :mod:`lightning_ort.trainer.state`. The rest, which is the checkpoint without the weights and
        moments that are in the state; its record has the ``prefix`` besides.

    Raises:
        CheckpointError: names do not fit, or its optimizer has no counterpart.
    """
    record = checkpoint.get(RECORD)
    if record is None:
        raise CheckpointError(
            f"{path} was not written under strategy='ort' (it lacks {RECORD!r}), so that nothing tells which of its "
            "optimizer states belongs to which weight. Resume it once with Trainer(strategy='ort') and save it again; "
            "or take the weights alone: model.load_state_dict(torch.load(...)['state_dict'])."
        )
    key = weights_key(checkpoint)
    given = checkpoint[key]
    prefix = find_prefix(list(weights), list(given), prefix, f"{path} and this ORTTrainer")
    # further names of a tensor are no entries of their own, unless the trainer knows the tensor by one of them
    inner = {name[len(prefix) :]: name for name in given if name.startswith(prefix)}
    inner = {n: name for n, name in inner.items() if n in weights or name not in record["shared"]}
    state: dict[str, Any] = {
        "model": {"full_precision": {n: given[name] for n, name in inner.items()}},
        "train_step_info": dict(record["train_step_info"]),
        "trainer_options": {"world_size": 1, "zero_stage": 0},
    }
    if record["loss_scaler"] is not None:
        state["loss_scaler"] = record["loss_scaler"]
    rest = {k: v for k, v in checkpoint.items() if k != key}
    rest[key] = {name: value for name, value in given.items() if name not in inner.values()}
    rest[RECORD] = {**record, "prefix": prefix}
    if "optimizer_states" in checkpoint:
        trainer_names = {record["shared"].get(name, name): n for n, name in inner.items() if n in weights}
        rest["optimizer_states"] = _take_moments(checkpoint, record, trainer_names, weights, trained, state, path)
    return state, rest


def _take_moments(
    checkpoint: Mapping[str, Any],
    record: Mapping[str, Any],
    trainer_names: Mapping[str, str],
    weights: Mapping[str, Tensor],
    trained: Collection[str],
    state: dict[str, Any],
    path: Any,
) -> list[Any]:
    """Fill in the optimizer's part of ``state``; what stays of the checkpoint's optimizer states."""
    kinds: list[str] = []
    states: dict[str, Any] = {}
    left: list[Any] = []
    for optimizer, own in zip(checkpoint["optimizer_states"], record["optimizers"], strict=True):
        taken = {i: trainer_names[name] for i, name in enumerate(own["names"]) if name in trainer_names}
        if not taken:
            left.append(optimizer)
            continue
        if not own["kind"]:
            raise CheckpointError(
                f"{path}: its optimizer cannot be that of an ORTTrainer: {own['problem']}. To take the weights alone: "
                "model.load_state_dict(torch.load(...)['state_dict'])."
            )
        kinds.append(own["kind"])
        # frozen weights may be in the optimizer, but an ORTTrainer has no state for them
        states |= {
            n: optimizer["state"].get(i, {}) for i, n in taken.items() if n in trained or i in optimizer["state"]
        }
        kept = {i: without_moments(s) if i in taken else s for i, s in optimizer["state"].items()}
        left.append({**optimizer, "state": kept})
    if len(set(kinds)) > 1:
        raise CheckpointError(f"{path}: the weights of this ORTTrainer have several optimizers: {', '.join(kinds)}.")
    if kinds:
        state["trainer_options"]["optimizer_name"] = kinds[0]
        try:
            state["optimizer"] = to_moments(kinds[0], states, weights)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
    return left
