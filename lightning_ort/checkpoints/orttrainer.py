"""Checkpoint files: HDF5 in the layout of ONNX Runtime's ORTTrainer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np

from lightning_ort.checkpoints.hdf5 import read_group
from lightning_ort.checkpoints.user_dict import decode, encode
from lightning_ort.errors import CheckpointError, DamagedFileError
from lightning_ort.files.checksums import is_intact, seal
from lightning_ort.files.reading import refusing
from lightning_ort.files.writing import write_file

__all__ = ["LIGHTNING", "aggregate", "read", "read_all", "read_state", "write"]

_GROUP = "lightning_ort"
"""Of an HDF5 file: what the original neither writes nor reads."""

_SCALER, LIGHTNING = _OWN = ("loss_scaler", "lightning")
"""Its entries: of the loss scaler, and what a Lightning checkpoint holds besides weights and moments."""


def write(path: str | os.PathLike[str] | IO[bytes], state: Mapping[str, Any], user_dict: Mapping[str, Any]) -> None:
    """Write ``state`` and ``user_dict``; the file appears under its name when it is complete.

    Args:
        path: a file that does not exist, or an open binary file.
        state: nested dictionaries of arrays, numbers, bools and strings.
        user_dict: see :func:`~lightning_ort.checkpoints.user_dict.encode`.

    Raises:
        FileExistsError: there is a file of that name.
        FileNotFoundError: its folder does not exist.
        TypeError: ``user_dict`` holds something that cannot be stored.
    """
    content = _with_own_group({**state, "user_dict": encode(user_dict)})
    if not isinstance(path, (str, os.PathLike)):
        _write_file(path, content)
        return
    with write_file(Path(path), replace=False) as stream:
        _write_file(stream, content)


def _write_file(stream: IO[bytes], content: Mapping[str, Any]) -> None:
    with h5py.File(stream, "w") as file:
        _write_group(file, content)
    seal(stream)


def _write_group(group: Any, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping):
            _write_group(group.create_group(key), value)
        else:
            group.create_dataset(key, data=value)


def read(path: str | os.PathLike[str] | IO[bytes], *, allow_pickle: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """State and user's dictionary of a file.

    Args:
        path: the file, or an open binary file.
        allow_pickle: accept a user's dictionary that was pickled, as ONNX Runtime did. Unpickling a file executes
            whatever its author put into it.

    Raises:
        ValueError: no HDF5 file, or one whose user's dictionary is pickled and ``allow_pickle`` is not set.
        CheckpointError: it is damaged, or lacks what every checkpoint has.
    """
    values = read_state(path)
    text = values.pop("user_dict", None)
    user_dict = {} if text is None else decode(text, f"the user_dict of {path}", allow_pickle=allow_pickle)
    return values, user_dict


def read_state(path: str | os.PathLike[str] | IO[bytes], name: Any = None) -> dict[str, Any]:
    """All that a file holds, the user's dictionary as it was encoded; errors as of :func:`read`.

    Args:
        path: the file, or an open binary file.
        name: what an open file is called in messages.
    """
    name = path if name is None else name
    with _opened(path, name) as stream, refusing(name, "no checkpoint of ORTTrainer, or cut short or damaged"):
        size = stream.seek(0, os.SEEK_END)
        # before the library follows addresses in a damaged file, which may never end
        if not is_intact(stream):
            raise DamagedFileError("its checksum is wrong")
        # by the handle, as the name may be another file's meanwhile
        with h5py.File(stream, "r") as file:
            content = read_group(file, size)
        _check_layout(content)
        return _without_own_group(content, name)


_SECTIONS = {"trainer_options": 1, "train_step_info": 1, "model": 2, "optimizer": 2, "partition_info": 2, _GROUP: 1}
"""How deep the groups within a section are; what they hold are arrays, numbers and texts."""

_NUMBERS = ("train_step_info", "model", "optimizer")


def _check_layout(content: Mapping[str, Any]) -> None:
    if "trainer_options" not in content:
        raise CheckpointError("it holds no 'trainer_options', as every checkpoint of an ORTTrainer does")
    for section, depth in _SECTIONS.items():
        level = [(section, content.get(section, {}))]
        for _ in range(depth):
            for name, group in level:
                if not isinstance(group, dict):
                    raise DamagedFileError(f"{name!r} is no group")
            level = [(f"{name}/{key}", value) for name, group in level for key, value in group.items()]
        for name, value in level:
            if section in _NUMBERS and (isinstance(value, (dict, str)) or value is None):
                raise DamagedFileError(f"{name!r} is no array of numbers")
    for name, value in content.get("train_step_info", {}).items():
        if np.ndim(value) or not np.isfinite(value):
            raise DamagedFileError(f"'train_step_info/{name}' is {value}; expected a number")


def _with_own_group(content: Mapping[str, Any]) -> dict[str, Any]:
    """Put what the original has no place for into one group."""
    found = {key: value for key, value in content.items() if key not in _OWN}
    own = {key: content[key] for key in _OWN if key in content}
    if _SCALER in own:
        own[_SCALER] = {**own[_SCALER], "state": encode(own[_SCALER]["state"])}
    return {**found, _GROUP: own} if own else found


def _without_own_group(content: dict[str, Any], path: Any) -> dict[str, Any]:
    """The opposite."""
    own = content.pop(_GROUP, {})
    if _SCALER in own:
        needed = {"state", "kind", "loss_scale", "skipped_steps"}
        if not isinstance(own[_SCALER], dict) or not needed <= own[_SCALER].keys():
            raise DamagedFileError(f"'{_GROUP}/{_SCALER}' is no loss scaler")
        own[_SCALER]["state"] = decode(own[_SCALER]["state"], f"the loss scaler of {path}", allow_pickle=False)
    return {**content, **own}


def read_all(paths: Sequence[Any], *, allow_pickle: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """State and user's dictionary of all files of one checkpoint.

    A training on several devices with ZeRO wrote one file per device, each with the whole weights or with a part of
    them as one row; the others have what the first has.

    Raises:
        IndexError: no file is named.
        AssertionError: there are more or fewer files than the checkpoint consists of, or they do not belong together.
    """
    if not paths:
        raise IndexError("load_checkpoint() needs the path of at least one file.")
    parts = [read(path, allow_pickle=allow_pickle) for path in paths]
    with refusing(paths[0], "no checkpoint of ORTTrainer, or a damaged one"):
        options = parts[0][0]["trainer_options"]
        expected = int(options["world_size"]) if int(options["zero_stage"]) > 0 else 1
    if len(paths) != expected:
        raise AssertionError(f"Expected number of files to load: {expected}, got {len(paths)}")
    if expected == 1:
        return parts[0]
    return aggregate([state for state, _ in parts]), parts[0][1]


@contextlib.contextmanager
def _opened(path: Any, name: Any) -> Iterator[IO[bytes]]:
    if not isinstance(path, (str, os.PathLike)):
        yield path
        return
    if not h5py.is_hdf5(path):
        absent = "" if os.path.exists(path) else " There is no file of that name."
        raise CheckpointError(f"{name} is not an hdf5 file or a python file-like object.{absent}")
    with open(path, "rb") as stream:
        yield stream


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
    steps = {str(sorted(state.get("train_step_info", {}).items())) for state in ordered}
    if len(steps) > 1:
        raise AssertionError(f"The files do not belong together: they were saved at different steps ({sorted(steps)})")
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
