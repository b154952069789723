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

    With stage 1 of ZeRO each process writes ``<checkpoint_prefix>.ZeRO.<rank>.<last rank>.ort.pt``.

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
    path = directory / f"{checkpoint_prefix}{_part(model)}{_SUFFIX}"
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
        CheckpointError: it is damaged, or of another kind; or files of ranks are missing.
        UnpicklingError: it holds objects other than tensors, numbers, strings and collections of these.
        NotImplementedError: ONNX Runtime's files of a training with ZeRO, which hold pieces of moments.
    """
    path = Path(checkpoint_dir) / f"{checkpoint_prefix}{_SUFFIX}"
    paths = [path] if path.exists() else sorted(Path(checkpoint_dir).glob(f"{checkpoint_prefix}.ZeRO.*{_SUFFIX}"))
    if not paths:
        raise AssertionError(f"Couldn't find checkpoint file {path}.")
    contents = [_content(path) for path in paths]
    state = {name: value for content in contents for name, value in content.pop("model").items()}
    if paths != [path]:
        _check_parts(paths, state, model)
    model.load_state_dict(state, strict=strict)
    return contents[0]


def _part(model: ORTTrainer) -> str:
    """Which part of all states a process has, for the name of its file."""
    trainer = model._trainer
    processes = trainer._processes
    if processes is None or not trainer._shares_states():
        return ""
    return f".ZeRO.{processes.rank}.{processes.world_size - 1}"


def _content(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        content = lightning.load(stream, path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or not isinstance(content.get("model"), Mapping):
        raise CheckpointError(f"{path} holds no 'model', as every checkpoint of the older ORTTrainer does.")
    return content


def _check_parts(paths: list[Path], state: Mapping[str, Any], model: ORTTrainer) -> None:
    """Raise if files of several processes are not all there, or hold pieces of moments."""
    last = paths[0].name.removesuffix(_SUFFIX).rpartition(".")[2]
    stem = paths[0].name[: paths[0].name.rindex(".ZeRO.")]
    expected = {f"{stem}.ZeRO.{rank}.{last}{_SUFFIX}" for rank in range(int(last) + 1)} if last.isdigit() else set()
    if {path.name for path in paths} != expected:
        raise CheckpointError(
            f"{paths[0].parent} holds {', '.join(path.name for path in paths)}; expected the file of each rank of one "
            "training, and no others."
        )
    layout = model._trainer._optimizer.layout()
    shapes = {f"{key}_{name}": v.shape for name, values in layout.items() for key, v in values.items()}
    cut = [name for name, shape in shapes.items() if name in state and tuple(state[name].shape) != tuple(shape)]
    if cut:
        raise NotImplementedError(
            f"{paths[0]} and the files of other ranks hold pieces of moments ({cut[0]} has shape "
            f"{list(state[cut[0]].shape)}; expected {list(shapes[cut[0]])}): put them together with "
            "onnxruntime-training 1.16, and save one file."
        )
