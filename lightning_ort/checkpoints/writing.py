"""Files that appear under their name when they are complete."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows; what a process that died has left is not removed there
    fcntl = None  # type: ignore[assignment]

__all__ = ["write_file"]

# Neither contains the name of the file: Lightning looks for "last" and "hpc_ckpt_" in the names of a folder.
_PREFIX, _SUFFIX = ".saving-", ".tmp"


@contextlib.contextmanager
def write_file(target: Path, *, replace: bool) -> Iterator[IO[bytes]]:
    """A stream whose content is the file ``target`` once the block has ended without an exception.

    It is a temporary file in the same folder, forced to the disk and then renamed: whenever the process or the machine
    dies, ``target`` is what it was before or complete. What a process that died has left is removed by the next one
    that writes into the folder.

    Args:
        target: a file in an existing folder.
        replace: take the place of a file of that name.

    Raises:
        FileExistsError: there is such a file and ``replace`` is not set.
        FileNotFoundError: the folder does not exist.
    """
    if not replace and target.exists():
        raise _exists(target)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"The folder of {target} does not exist.")
    _remove_abandoned(target.parent)
    stream, temporary = _temporary_file(target.parent)
    try:
        with stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            _publish(temporary, target, replace)
        _sync_folder(target.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _temporary_file(folder: Path) -> tuple[IO[bytes], str]:
    """An empty file, locked as long as it is open."""
    while True:
        handle, name = tempfile.mkstemp(dir=folder, prefix=_PREFIX, suffix=_SUFFIX)
        # another process that cleans up may have got hold of it before it was locked
        _lock(handle, wait=True)
        if os.path.exists(name):
            return os.fdopen(handle, "w+b"), name
        os.close(handle)


def _lock(handle: int, *, wait: bool) -> bool:
    """Whether the file is this process's; the system takes a lock away from a process that dies."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody else's, or a file system without locks
        return False
    return True


def _remove_abandoned(folder: Path) -> None:
    for entry in list(os.scandir(folder)):
        if not (entry.name.startswith(_PREFIX) and entry.name.endswith(_SUFFIX)):
            continue
        with contextlib.suppress(OSError):
            handle = os.open(entry.path, os.O_RDWR)
            try:
                if _lock(handle, wait=False):
                    os.unlink(entry.path)
            finally:
                os.close(handle)


def _publish(temporary: str, target: Path, replace: bool) -> None:
    if replace:
        os.replace(temporary, target)
        return
    try:
        # unlike a renaming, fails if somebody else has taken the name in the meantime
        os.link(temporary, target)
    except FileExistsError:
        raise _exists(target) from None
    except OSError:  # a file system without hard links
        if target.exists():
            raise _exists(target) from None
        os.rename(temporary, target)


def _exists(target: Path) -> FileExistsError:
    return FileExistsError(f"{target} exists. Choose another name, or remove the file.")


def _sync_folder(folder: Path) -> None:
    """Force the new name to the disk."""
    with contextlib.suppress(OSError):  # not every system opens folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
