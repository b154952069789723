"""Files that appear under their name when they are complete."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows; what a process that died has left is not removed there
    fcntl = None  # type: ignore[assignment]

__all__ = ["companion", "write_file", "write_path"]

# Neither contains the name of the file: Lightning looks for "last" and "hpc_ckpt_" in the names of a folder.
_PREFIX, _SUFFIX = ".saving-", ".tmp"
_LOCK = "lock"
# no space, too large a file, a broken disk, a quota (which Windows has not)
_UNWRITABLE = (errno.ENOSPC, errno.EFBIG, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC))
_FOLDERS = f"{_PREFIX}{'[0-9a-f]' * 8}{_SUFFIX}"


@contextlib.contextmanager
def write_file(target: Path, *, replace: bool) -> Iterator[IO[bytes]]:
    """A stream whose content is the file ``target`` once the block has ended without an exception.

    See :func:`write_path`.
    """
    with write_path(target, replace=replace) as temporary:
        raw = _Recording(temporary, "w+b")
        try:
            with io.BufferedRandom(raw) as stream:
                yield stream
        except Exception as error:
            # torch and HDF5 have reasons of their own for what the system has told them
            if raw.failure is not None and raw.failure is not error:
                raise raw.failure from error
            raise


class _Recording(io.FileIO):
    """A file that remembers why it could not be written."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


@contextlib.contextmanager
def write_path(target: Path, *, replace: bool = True) -> Iterator[Path]:
    """A path where the block writes what is the file ``target`` once it has ended without an exception.

    The path has the name of ``target``, in a temporary folder beside it. What is written there is forced to the disk
    and then renamed: whenever the process or the machine dies, ``target`` is what it was before or complete. What a
    process that died has left is removed by the next one that writes into the folder.

    Args:
        target: a file in an existing folder.
        replace: take the place of a file of that name.

    Raises:
        FileExistsError: there is such a file and ``replace`` is not set.
        FileNotFoundError: the folder does not exist.
        OSError: the disk is full (``errno.ENOSPC``), a quota or the largest size of a file is exceeded; the error names
            ``target``, which is what it was before.
    """
    if not replace and target.exists():
        raise _exists(target)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"The folder of {target} does not exist.")
    _remove_abandoned(target.parent)
    with _naming(target):
        folder, handle = _temporary_folder(target.parent)
    temporary = folder / target.name
    try:
        with _naming(target, folder):
            yield temporary
            others = [p for p in folder.iterdir() if p.name not in (target.name, _LOCK)]
            for path in [*others, temporary]:
                _sync(path, os.O_RDWR)
        for path in others:
            os.replace(path, target.parent / path.name)
        _publish(temporary, target, replace)
        with contextlib.suppress(OSError):  # not every system opens folders
            _sync(target.parent, os.O_RDONLY)
    finally:
        os.close(handle)
        _discard(folder)


@contextlib.contextmanager
def _naming(target: Path, folder: Path | None = None) -> Iterator[None]:
    """Say which file it is that could not be written."""
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        if number is None and folder is not None:
            number = _probed(folder)
        if number is None or number not in _UNWRITABLE:
            raise
        text = f"{os.strerror(number)}. Nothing has been written, and what there was is as it was"
        raise OSError(number, text, str(target)) from error


def _probed(folder: Path) -> int | None:
    """Why nothing can be written into a folder: not every library hands on what the system has told it."""
    try:
        with open(folder / _LOCK, "ab", buffering=0) as file:
            file.write(bytes(1 << 16))
    except OSError as error:
        return error.errno
    return None


def companion(temporary: Path, suffix: str) -> Path:
    """Where to write a second file, which appears just before the one of :func:`write_path`, in the same folder.

    Its name is another each time, so that what an old file refers to stays until the new one has taken its place.

    Args:
        temporary: what :func:`write_path` gave.
        suffix: ``".data"`` makes it ``<stem>.<number>.data``.
    """
    return temporary.with_name(f"{temporary.stem}.{_number(temporary.parent)}{suffix}")


def _number(folder: Path) -> str:
    return folder.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)


def _temporary_folder(parent: Path) -> tuple[Path, int]:
    """A folder with nothing but a file that is locked as long as its handle is open."""
    while True:
        folder = parent / f"{_PREFIX}{secrets.token_hex(4)}{_SUFFIX}"
        lock = folder / _LOCK
        folder.mkdir()
        # another process that cleans up may get hold of the folder before it is locked
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(lock, os.O_RDWR | os.O_CREAT)
            _lock(handle, wait=True)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(lock)):
                    return folder, handle
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


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(_FOLDERS):
        with contextlib.suppress(OSError):
            handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT)
            try:
                if _lock(handle, wait=False):
                    _discard(folder)
            finally:
                os.close(handle)


def _discard(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        if any(name != _LOCK for name in os.listdir(folder)):
            # the file has not got its name, so that nothing refers to companions that have theirs
            for path in folder.parent.glob(f"*.{_number(folder)}.*"):
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _publish(temporary: Path, target: Path, replace: bool) -> None:
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


def _sync(path: Path, flags: int) -> None:
    """Force a file, or the names in a folder, to the disk."""
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
