"""Checkpoints as Lightning writes them, by ``torch.save``."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from typing import IO, Any

import torch

from lightning_ort.errors import CheckpointError

__all__ = ["HDF5", "check_lightning", "is_torch_file", "load", "starts_with"]

HDF5 = b"\x89HDF\r\n\x1a\n"
_ZIP = b"PK\x03\x04"


def starts_with(stream: IO[bytes]) -> bytes:
    """The first bytes of a file; the stream stays where it is."""
    place = stream.tell()
    head = stream.read(len(HDF5))
    stream.seek(place)
    return head


def is_torch_file(stream: IO[bytes]) -> bool:
    """Whether ``torch.save`` may have written it: a zip archive, or the bare pickle that it was until torch 1.5."""
    return starts_with(stream).startswith((_ZIP, b"\x80"))


def load(stream: IO[bytes], name: Any, *, map_location: Any, weights_only: bool | None) -> Any:
    """What ``torch.save`` wrote.

    Args:
        stream: the open file.
        name: of the file, for messages.
        map_location: see ``torch.load``.
        weights_only: see ``torch.load``.

    Raises:
        CheckpointError: the file is cut short or damaged, or of another kind.
        UnpicklingError: it is in order, but holds objects that ``weights_only`` forbids; torch's message names them.
    """
    head = starts_with(stream)
    if not is_torch_file(stream):
        what = f"begins with {head!r}" if head else "is empty"
        raise CheckpointError(
            f"{name} is no checkpoint: it {what}. Expected a file of Trainer.save_checkpoint, ModelCheckpoint, or "
            "ORTTrainer.save_checkpoint."
        )
    sound = False
    try:
        if head.startswith(_ZIP):
            # torch itself does not look at the checksums
            with zipfile.ZipFile(stream) as archive:
                broken = archive.testzip()
            if broken is not None:
                raise _damaged(name, f"the checksum of its part {broken} is wrong")
            stream.seek(0)
            sound = True
        return torch.load(stream, map_location=map_location, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if sound:
            raise
        raise _damaged(name, error) from error
    except (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError, OSError) as error:
        raise _damaged(name, error) from error


def _damaged(name: Any, reason: object) -> CheckpointError:
    return CheckpointError(f"{name} is cut short or damaged: {str(reason).splitlines()[0]}. Use another checkpoint.")


def check_lightning(checkpoint: Any, name: Any) -> dict[str, Any]:
    """``checkpoint``, if it is a dictionary as Lightning's Trainer writes it.

    Raises:
        CheckpointError: it is something else.
    """
    needed = ("state_dict", "pytorch-lightning_version")
    if isinstance(checkpoint, dict) and all(key in checkpoint for key in needed):
        return checkpoint
    holds = f"a {type(checkpoint).__name__}"
    if isinstance(checkpoint, Mapping):
        keys = [str(key) for key in checkpoint]
        holds = f"a dictionary of {', '.join(keys[:6]) or 'nothing'}{' ...' if len(keys) > 6 else ''}"
    raise CheckpointError(
        f"{name} was written by torch.save, but is no checkpoint of Lightning: it holds {holds}, and lacks "
        f"{' or '.join(needed)}. If these are weights, load them into the module: load_state_dict(torch.load(...))."
    )
