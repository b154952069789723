"""Checkpoints of Lightning as files of an ORTTrainer."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Iterator, Mapping
from typing import IO, Any

import numpy as np
import torch

from lightning_ort.checkpoints.torch_files import check_lightning, is_torch_file, load

__all__ = ["is_lightning", "pack", "read", "unpack"]


def is_lightning(path: str | os.PathLike[str] | IO[bytes]) -> bool:
    """Whether this is a file of ``torch.save``, rather than HDF5 or nothing at all."""
    if isinstance(path, (str, os.PathLike)) and not os.path.isfile(path):
        return False
    with _opened(path) as stream:
        return is_torch_file(stream)


def read(path: str | os.PathLike[str] | IO[bytes], *, allow_pickle: bool) -> dict[str, Any]:
    """A checkpoint of Lightning, its tensors on the CPU.

    Args:
        path: the file, or an open binary file.
        allow_pickle: accept objects besides tensors, numbers and strings, such as hyper-parameters may be. Unpickling
            executes whatever the author of a file put into it.

    Raises:
        CheckpointError: the file is cut short, damaged, or of another kind.
        ValueError: there are such objects and ``allow_pickle`` is not set.
    """
    with _opened(path) as stream:
        try:
            found = load(stream, path, map_location="cpu", weights_only=not allow_pickle)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{path} holds pickled objects besides tensors, numbers and strings, and unpickling "
                "executes whatever the author of the file put into it. If you trust the file, load it with "
                "allow_pickle=True."
            ) from error
    return check_lightning(found, path)


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str] | IO[bytes]) -> Iterator[IO[bytes]]:
    if isinstance(path, (str, os.PathLike)):
        with open(path, "rb") as stream:
            yield stream
    else:
        yield path


def pack(rest: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`~lightning_ort.checkpoints.to_trainer.to_trainer` left over, as an entry of an HDF5 file."""
    stream = io.BytesIO()
    torch.save(dict(rest), stream)
    return {"checkpoint": np.frombuffer(stream.getvalue(), np.uint8)}


def unpack(group: Mapping[str, Any], path: Any, weights_only: bool | None) -> dict[str, Any]:
    """What :func:`pack` was given.

    Raises:
        CheckpointError: it is damaged.
        UnpicklingError: it holds objects that ``weights_only`` forbids.
    """
    stream = io.BytesIO(np.asarray(group["checkpoint"]).tobytes())
    return load(stream, path, map_location="cpu", weights_only=weights_only)
