"""``lightning-ort cache``: what is kept for later runs, and how to be rid of it."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from lightning_ort.files.cache import KINDS, Cache, cache_folder

__all__ = ["cache"]


def cache(arguments: Sequence[str] = ()) -> int:
    """Print where the cache is and what it holds, or clear it.

    Args:
        arguments: of the command: ``--clear`` or nothing.

    Returns:
        0, or 1 if there is no folder, or one that this user may not read or change.
    """
    parser = argparse.ArgumentParser(
        "lightning-ort cache",
        description="Show what is kept for later runs.",
        epilog="LIGHTNING_ORT_CACHE_DIR is the folder, LIGHTNING_ORT_CACHE_SIZE how many bytes it may take.",
        allow_abbrev=False,
    )
    parser.add_argument("--clear", action="store_true", help="remove all of it")
    clear = parser.parse_args(arguments).clear
    try:
        folder = cache_folder()
        lines = [f"{k}: {Cache(k).clear()} removed" if clear else _described(k, what) for k, what in KINDS.items()]
    except OSError as error:
        known = "LIGHTNING_ORT_CACHE_DIR" in str(error)
        print(error if known else f"{error}. LIGHTNING_ORT_CACHE_DIR may name another folder.", file=sys.stderr)
        return 1
    print(folder, *lines, sep="\n")
    return 0


def _described(kind: str, what: str) -> str:
    sizes = []
    for entry in Cache(kind).entries():
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            sizes.append(entry.stat().st_size)
    return f"{kind} ({what}): {len(sizes)}, {sum(sizes) / 1024:.1f} KiB"
