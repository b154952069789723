"""A folder of small files that make later runs start faster; whatever is wrong with it, it is as if it were empty."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs

from lightning_ort._version import __version__
from lightning_ort.files.writing import write_file

__all__ = ["KINDS", "Cache", "cache_folder", "is_in_use"]

KINDS = {
    "choices": "who runs a graph fastest",
    "sizes": "which sizes of batches change",
    "traces": "operators of a graph and of its gradients",
}
"""names of the kinds of entries, and what an entry says"""

_FOLDER, _SIZE = "LIGHTNING_ORT_CACHE_DIR", "LIGHTNING_ORT_CACHE_SIZE"
_DEFAULT_SIZE = 64 << 20
_BLOCK = 4096
"""bytes that a small file takes"""


def cache_folder() -> Path:
    """``LIGHTNING_ORT_CACHE_DIR``, or where this system keeps the caches of its users.

    Raises:
        OSError: the user has no home, and no other folder was named.
    """
    try:
        named = os.environ.get(_FOLDER)
        return Path(named).expanduser() if named else platformdirs.user_cache_path("lightning_ort", appauthor=False)
    except RuntimeError as error:  # pathlib's, of a user without a home
        raise FileNotFoundError(f"There is no folder for a cache ({error}). Name one by {_FOLDER}.") from error


def is_in_use() -> bool:
    """Whether a process may follow what others, or itself, have found: not under ``LIGHTNING_ORT_MEASURE=0``."""
    return os.environ.get("LIGHTNING_ORT_MEASURE", "1") != "0"


def _limit() -> int:
    """Bytes that the cache may take: ``LIGHTNING_ORT_CACHE_SIZE``, 64 MiB by default; 0 switches it off."""
    text = os.environ.get(_SIZE)
    if not text:
        return _DEFAULT_SIZE
    try:
        return int(text)
    except ValueError:
        _warn_of_size(text)
        return _DEFAULT_SIZE


@functools.cache
def _warn_of_size(text: str) -> None:
    warnings.warn(
        f"{_SIZE}={text!r} is no whole number of bytes; the cache may take {_DEFAULT_SIZE} of them.", stacklevel=2
    )


@dataclasses.dataclass(frozen=True)
class Cache:
    """One kind of entries, each a mapping in JSON.

    Attributes:
        kind: name of the kind, one of :data:`KINDS`, and of the folder of its entries.
        largest: bytes of an entry that is read.
    """

    kind: str
    largest: int = 1 << 20

    @property
    def folder(self) -> Path:
        """Where the entries are."""
        return cache_folder() / self.kind

    def read(self, key: str) -> dict[str, Any] | None:
        """The entry ``key``; ``None`` if there is none, or if it is of another version, damaged or foreign."""
        try:
            path = self.folder / f"{key}.json"
            status = path.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > self.largest:  # a pipe would be waited for
                return None
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(content, dict) or content.get("version") != __version__:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # what is used stays
        return content

    def write(self, key: str, content: dict[str, Any]) -> None:
        """Keep ``content``; where that is impossible (no space, a folder of somebody else) nothing happens."""
        limit = _limit()
        if limit <= 0:
            return
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with write_file(self.folder / f"{key}.json", replace=True) as stream:
                stream.write(json.dumps({"version": __version__, **content}).encode())
            self._shrink(limit)

    def entries(self) -> Iterator[os.DirEntry[str]]:
        """The files of all entries.

        Raises:
            OSError: the folder is there and cannot be read.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.folder) as found:
            yield from (e for e in found if e.name.endswith(".json") and e.is_file(follow_symlinks=False))

    def clear(self) -> int:
        """Remove all entries; returns how many there were.

        Raises:
            OSError: one cannot be removed.
        """
        entries = list(self.entries())
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process was first
                os.unlink(entry.path)
        return len(entries)

    @staticmethod
    def _shrink(limit: int) -> None:
        """Remove what was not used for longest, of any kind, until the rest takes less than ``limit`` bytes."""
        known = []
        for kind in KINDS:  # other folders beside them are somebody else's
            for entry in Cache(kind).entries():
                with contextlib.suppress(OSError):
                    found = entry.stat()
                    known.append((found.st_mtime, max(found.st_size, _BLOCK), entry.path))
        excess = sum(size for _, size, _ in known) - limit
        for _, size, path in sorted(known):
            if excess <= 0:
                return
            with contextlib.suppress(OSError):
                os.unlink(path)
                excess -= size
