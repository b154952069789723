"""``onnxruntime.training.checkpoint``: checkpoint files of an ORTTrainer without a trainer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from lightning_ort.checkpoints import orttrainer
from lightning_ort.validation import flag, path, shown

__all__ = ["aggregate_checkpoints"]


def aggregate_checkpoints(
    paths: Sequence[str | os.PathLike[str]], pytorch_format: bool = True, *, allow_pickle: bool = False
) -> dict[str, Any]:
    """One state from the files that the ranks of a training with ZeRO wrote.

    Args:
        paths: all files of the checkpoint, in any order.
        pytorch_format: give weights alone, for a module's ``load_state_dict``.
        allow_pickle: see ``ORTTrainer.load_checkpoint``.

    Returns:
        Name to tensor; or what ``ORTTrainer.state_dict`` gives, for ``load_state_dict`` of a trainer in one process,
        with ``user_dict``.

    Raises:
        TypeError: ``paths`` is no list of paths.
        IndexError: it is empty.
        ValueError, KeyError, OSError: a file is no checkpoint, or damaged; or its ``user_dict`` is pickled.
        AssertionError: more or fewer files than the checkpoint has, or files that do not belong together.
        NotImplementedError: weights are divided among processes, as Megatron does.
    """
    if isinstance(paths, (str, bytes, os.PathLike)) or not isinstance(paths, Sequence):
        raise TypeError(f"paths={shown(paths)}: expected a list of paths.")
    files = [path("paths", one) for one in paths]
    flag("pytorch_format", pytorch_format)
    state, user_dict = orttrainer.read_all(files, allow_pickle=allow_pickle)
    options = state["trainer_options"]
    if int(options.get("horizontal_parallel_size", 1)) > 1:
        raise NotImplementedError(
            f"{files[0]} holds a part of each weight: horizontal_parallel_size is "
            f"{options['horizontal_parallel_size']}. Only ZeRO's parts are put together. Use onnxruntime-training 1.16."
        )
    if pytorch_format:
        return {name: torch.tensor(value) for name, value in state["model"]["full_precision"].items()}
    one = {"zero_stage": 0, "world_rank": 0, "world_size": 1, "data_parallel_size": 1, "horizontal_parallel_size": 1}
    return {**state, "trainer_options": {**options, **one}, "user_dict": user_dict}
