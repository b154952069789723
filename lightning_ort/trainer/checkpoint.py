"""Checkpoint files: HDF5 in the layout of ONNX Runtime's ORTTrainer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np

from lightning_ort.checkpoints.seal import is_intact, seal
from lightning_ort.files.writing import write_file
from lightning_ort.trainer.aggregation import aggregate
from lightning_ort.trainer.user_dict import decode, encode

__all__ = ["LIGHTNING", "SCALER", "read", "read_all", "read_state", "write"]

_GROUP = "lightning_ort"
"""Of an HDF5 file: what the original neither writes nor reads."""

SCALER, LIGHTNING = _OWN = ("loss_scaler", "lightning")
"""Its entries: of the loss scaler, and what a Lightning checkpoint holds besides weights and moments."""


def write(path: str | os.PathLike[str] | IO[bytes], state: Mapping[str, Any], user_dict: Mapping[str, Any]) -> None:
    """Write ``state`` and ``user_dict``; the file appears under its name when it is complete.

    Args:
        path: a file that does not exist, or an open binary file.
        state: nested dictionaries of arrays, numbers, bools and strings.
        user_dict: see :func:`~lightning_ort.trainer.user_dict.encode`.

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
        KeyError: it lacks what every checkpoint has.
        OSError: the file is damaged.
    """
    values = read_state(path)
    text = values.pop("user_dict", None)
    user_dict = {} if text is None else decode(text, f"the user_dict of {path}", allow_pickle=allow_pickle)
    return values, user_dict


def read_state(path: str | os.PathLike[str] | IO[bytes]) -> dict[str, Any]:
    """All that a file holds, the user's dictionary as it was encoded; errors as of :func:`read`."""
    with _opened(path) as file:
        if "trainer_options" not in file:
            raise KeyError(f"{path} holds no 'trainer_options', as every checkpoint of an ORTTrainer does.")
        return _without_own_group(_read_group(file), path)


def _with_own_group(content: Mapping[str, Any]) -> dict[str, Any]:
    """Put what the original has no place for into one group."""
    found = {key: value for key, value in content.items() if key not in _OWN}
    own = {key: content[key] for key in _OWN if key in content}
    if SCALER in own:
        own[SCALER] = {**own[SCALER], "state": encode(own[SCALER]["state"])}
    return {**found, _GROUP: own} if own else found


def _without_own_group(content: dict[str, Any], path: Any) -> dict[str, Any]:
    """The opposite."""
    own = content.pop(_GROUP, {})
    if SCALER in own:
        own[SCALER]["state"] = decode(own[SCALER]["state"], f"the loss scaler of {path}", allow_pickle=False)
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
    options = [state["trainer_options"] for state, _ in parts]
    expected = int(options[0]["world_size"]) if int(options[0]["zero_stage"]) > 0 else 1
    if len(paths) != expected:
        raise AssertionError(f"Expected number of files to load: {expected}, got {len(paths)}")
    if expected == 1:
        return parts[0]
    return aggregate([state for state, _ in parts]), parts[0][1]


@contextlib.contextmanager
def _opened(path: Any) -> Iterator[Any]:
    if isinstance(path, (str, os.PathLike)):
        if not h5py.is_hdf5(path):
            absent = "" if os.path.exists(path) else " There is no file of that name."
            raise ValueError(f"{path} is not an hdf5 file or a python file-like object.{absent}")
        with open(path, "rb") as stream:
            _check(stream, path)
    else:
        _check(path, path)
    with h5py.File(path, "r") as file:
        yield file


def _check(stream: IO[bytes], path: Any) -> None:
    # before the library follows addresses in a damaged file, which may never end
    if not is_intact(stream):
        raise OSError(f"{path} is damaged: its checksum is wrong")


def _read_group(group: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in group.items():
        if isinstance(item, h5py.Group):
            found[key] = _read_group(item)
            continue
        if not isinstance(item, h5py.Dataset):
            raise OSError(f"the entry {group.name}/{key} is damaged")
        value = item[()]
        if isinstance(value, bytes):
            value = value.decode()
        elif isinstance(value, np.generic) and np.ndim(value) == 0:
            value = value.item()
        found[key] = value
    return found
