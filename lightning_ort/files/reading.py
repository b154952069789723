"""Files from elsewhere: what they claim is checked before it is believed, and each refusal names the file."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lightning_ort.errors import CheckpointError, DamagedFileError

__all__ = ["cause_of", "check_growth", "consistent", "refusing"]

T = TypeVar("T")

_SMALL = 64 * 2**20
_GROWTH = 16
"""A content that takes less than ``_SMALL`` bytes, or ``_GROWTH`` times the file, is read; weights are compressed to a
half at best, so that only files that were made to fill the memory are beyond."""


def check_growth(stored: int, content: int, what: str) -> None:
    """Refuse a file whose content takes far more memory than the file has bytes.

    Args:
        stored: bytes of the file.
        content: bytes that it says it holds.
        what: what says so, for the message.

    Raises:
        DamagedFileError: a content that no file of this size has.
    """
    if content > max(_SMALL, _GROWTH * stored):
        raise DamagedFileError(f"{what} would take {_size(content)} in memory, and the file has {_size(stored)}")


def consistent(paths: Sequence[Path], read: Callable[[], T]) -> T:
    """What ``read`` gives; again, if it fails or a file is written over while another process replaces the files.

    Args:
        paths: all that it may read.
        read: reads each file by one handle, and fails where it has got files of two writings: by their checksums, or by
            what else tells them apart.
    """
    # files that are replaced one after the other do not all change within one read
    patience = 0.3 if len(paths) > 1 else 0.02
    for _ in range(_ATTEMPTS):
        before = _states(paths)
        try:
            found = read()
        except Exception:
            deadline = time.monotonic() + patience
            while before == (now := _states(paths)):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.002)
        else:
            now = _states(paths)
            # a file of another number has taken the place of the one that was read, which stayed as it was
            if not any(_written_over(old, new) for old, new in zip(before, now, strict=True)):
                return found
    return read()


def _written_over(old: tuple[int, ...] | None, new: tuple[int, ...] | None) -> bool:
    return old is not None and new is not None and old[:2] == new[:2] and old != new


def _states(paths: Sequence[Path]) -> list[tuple[int, ...] | None]:
    return [_state(path) for path in paths]


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _size(count: int) -> str:
    if count < 2**20:
        return f"{count} bytes"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


_ATTEMPTS = 20


@contextlib.contextmanager
def refusing(
    path: Any,
    problem: str = "cut short or damaged",
    advice: str = "",
    kind: type[CheckpointError] = DamagedFileError,
    prefix: bool = True,
) -> Iterator[None]:
    """Turn whatever reading a damaged file raises into one error that names the file and the cause.

    What is raised in the block is an error about the file, as nothing but the file differs from one read to the next.
    Errors of this package stay what they are, with the file's name before them if they lack it; so do those of the
    system that name a file (no such file, no permission).

    Args:
        path: of the file, or an open one.
        problem: what the file is then; the error says ``<path> is <problem>: <cause>.``
        advice: a sentence that follows.
        kind: of the error that anything else becomes.
        prefix: put the name before errors of this package; without, they are left alone.
    """
    name = path if isinstance(path, str) else os.fspath(path) if isinstance(path, os.PathLike) else str(path)
    try:
        yield
    except Exception as error:
        of_package = type(error).__module__.startswith("lightning_ort.")
        if (of_package or isinstance(error, ValueError)) and name in str(error):
            raise
        if isinstance(error, OSError) and (error.filename is not None or isinstance(error, FileNotFoundError)):
            raise
        if of_package and not isinstance(error, CheckpointError):
            if not prefix:
                raise
            raise type(error)(f"{name}: {error}") from error
        raised = type(error) if isinstance(error, CheckpointError) else kind
        raise raised(f"{name} is {problem}: {cause_of(error)}." + (f" {advice}" if advice else "")) from error


def cause_of(error: BaseException) -> str:
    """An exception in one short line without a full stop, also where its own text is no sentence."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    if isinstance(error, UnicodeDecodeError):
        return "a text in it is not in UTF-8"
    text = str(error.args[0] if error.args and isinstance(error, KeyError) else error).strip()
    line = text.splitlines()[0].rstrip(".: ") if text else ""
    if len(line) > 1000:
        line = f"{line[:1000]} ..."
    if isinstance(error, KeyError) and " " not in line:
        return f"it lacks {line!r}"
    return line or type(error).__name__
