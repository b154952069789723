"""Checkpoints of the older interface: files of ``torch.save``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_ort.checkpoints import lightning
from lightning_ort.errors import CheckpointError
from lightning_ort.files.writing import write_file

if TYPE_CHECKING:
    from lightning_ort.ort_trainer.trainer import ORTTrainer

__all__ = ["load_checkpoint", "save_checkpoint"]

_SUFFIX = ".ort.pt"


def save_checkpoint(
    model: ORTTrainer,
    checkpoint_dir: str | os.PathLike[str],
    checkpoint_prefix: str = "ORT_checkpoint",
    checkpoint_state_dict: Mapping[str, Any] | None = None,
    include_optimizer_state: bool = True,
) -> None:
    """Write ``<checkpoint_prefix>.ort.pt``, which is complete when it appears; one that exists is replaced.

    Args:
        model: whose ``state_dict`` is written, as ``"model"``.
        checkpoint_dir: an existing folder.
        checkpoint_prefix: of the name.
        checkpoint_state_dict: further entries.
        include_optimizer_state: write the moments too.

    Raises:
        AssertionError: there is no such folder.

    Warns:
        UserWarning: a file is replaced.
    """
    directory = Path(checkpoint_dir)
    if not directory.is_dir():
        raise AssertionError(f"ERROR: Checkpoint directory doesn't exist: {directory}")
    path = directory / f"{checkpoint_prefix}{_SUFFIX}"
    if path.exists():
        warnings.warn(f"{path} already exists, overwriting.", UserWarning, stacklevel=2)
    content = {**(checkpoint_state_dict or {}), "model": model.state_dict(include_optimizer_state)}
    with write_file(path, replace=True) as stream:
        torch.save(content, stream)


def load_checkpoint(
    model: ORTTrainer,
    checkpoint_dir: str | os.PathLike[str],
    checkpoint_prefix: str = "ORT_checkpoint",
    strict: bool = False,
) -> dict[str, Any]:
    """Load what :func:`save_checkpoint` wrote, or ONNX Runtime's function of this name.

    Args:
        model: takes over the state.
        checkpoint_dir: the folder.
        checkpoint_prefix: of the name.
        strict: see ``ORTTrainer.load_state_dict``.

    Returns:
        The further entries.

    Raises:
        AssertionError: there is no such file.
        CheckpointError: it is damaged, or of another kind.
        UnpicklingError: it holds objects other than tensors, numbers, strings and collections of these.
        NotImplementedError: only the parts that the ranks of a training with ZeRO wrote are there.
    """
    path = Path(checkpoint_dir) / f"{checkpoint_prefix}{_SUFFIX}"
    if not path.exists():
        parts = sorted(Path(checkpoint_dir).glob(f"{checkpoint_prefix}.ZeRO.*{_SUFFIX}"))
        if parts:
            raise NotImplementedError(
                f"{checkpoint_dir} holds {len(parts)} files of a training with ZeRO, one a rank ({parts[0].name}, "
                "...): put them together with onnxruntime-training 1.16, and save one file."
            )
        raise AssertionError(f"Couldn't find checkpoint file {path}.")
    with path.open("rb") as stream:
        content = lightning.load(stream, path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or not isinstance(content.get("model"), Mapping):
        raise CheckpointError(f"{path} holds no 'model', as every checkpoint of the older ORTTrainer does.")
    model.load_state_dict(content.pop("model"), strict=strict)
    return content
