"""What the C library does with memory that tensors on the CPU have left: keep it for the next ones, or give it back.

A step frees and takes the same memory again, every time. By itself, glibc gives freed memory back to the system above
sizes that depend on what was freed before, at most 32 MiB, and the system fills what it hands out with zeros, page by
page, when it is first touched. In networks whose activations are larger than that, it is up to a half of the time of a
step; in smaller ones it comes and goes with the luck of earlier allocations. While something trains, it is kept.

The numbers are those of ``mallopt(3)`` and of glibc's ``malloc/malloc.c``.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["keep_freed_memory", "trim", "watch"]

_log = logging.getLogger(__name__)

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""parameters of mallopt: free bytes at the end of the heap above which it shrinks; sizes that lie outside of it"""
_NEVER, _LARGEST = -1, 2**31 - 1
_USUAL = 32 << 20
"""the size that glibc goes up to by itself, with twice that at the end of the heap"""
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


@functools.cache
def _function(name: str) -> Callable[..., int] | None:
    """A function of glibc's; ``None`` where another C library serves the process."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def trim() -> None:
    """Give all memory back to the system that nothing is in, where the C library can."""
    function = _function("malloc_trim")
    if function is not None:
        function(0)


class _Heap:
    owners = 0
    keeps = False


def keep_freed_memory(owner: Any) -> weakref.finalize:
    """Have the C library keep freed memory of the process, until what is returned is called or ``owner`` is gone.

    Not where others have set how it does that, where ``LIGHTNING_ORT_KEEP_MEMORY=0``, or where the process has taken
    more than half of the memory that it could have: what is free then has gaps, and takes up to some tens of percent
    more.
    """
    _Heap.owners += 1
    if _Heap.owners == 1 and _may_be_set() and _has_room():
        _Heap.keeps = True
        _set(_LARGEST, _NEVER)
    token = weakref.finalize(owner, _let_go)
    token.atexit = False
    return token


def watch() -> None:
    """See whether there is memory left; a process that has taken more than half of it keeps nothing from now on."""
    if _Heap.keeps and not _has_room():
        _log.info("the process has taken more than half of the memory there is, and gives back what it frees")
        _give_back()


def _let_go() -> None:
    _Heap.owners -= 1
    if _Heap.owners == 0 and _Heap.keeps:
        _give_back()


def _give_back() -> None:
    _Heap.keeps = False
    _set(_USUAL, 2 * _USUAL)
    trim()


def _set(mmap_threshold: int, trim_threshold: int) -> None:
    function = _function("mallopt")
    assert function is not None
    function(_MMAP_THRESHOLD, mmap_threshold)
    function(_TRIM_THRESHOLD, trim_threshold)


def _may_be_set() -> bool:
    is_free = os.environ.get("LIGHTNING_ORT_KEEP_MEMORY", "1") != "0" and not any(map(os.environ.get, _SETTINGS))
    return is_free and "glibc.malloc" not in os.environ.get("GLIBC_TUNABLES", "") and _function("mallopt") is not None


def _has_room() -> bool:
    """Whether the process is known to have taken less than what it could still have."""
    try:
        taken = int((_PROC / "self" / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        rows = dict(line.split(":") for line in (_PROC / "meminfo").read_text().splitlines())
        free = 1024 * int(rows["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):  # a sandbox may have no such files
        return False
    return taken < min(free, _free_of_group())


def _free_of_group() -> float:
    """Bytes that the control group (version 2) of a container has left; those of files can be taken from these."""
    try:
        most = (_CGROUP / "memory.max").read_text().strip()
        if most == "max":
            return float("inf")
        rows = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return int(most) - int((_CGROUP / "memory.current").read_text()) + int(rows["inactive_file"])
    except (OSError, KeyError, ValueError):  # there is none, or it is of version 1
        return float("inf")
