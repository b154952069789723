"""``lightning-ort new``: a project to start from, which is the template of the examples."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_ort.cli.mistakes import Mistake
from lightning_ort.validation import listed

__all__ = ["new", "template"]

_PACKAGE = Path(__file__).parents[1]
# what runs and tools have left there in a clone
_NOT_COPIED = ("runs", "__pycache__", ".pytest_cache", "*.pyc")


def new(arguments: Sequence[str] = ()) -> int:
    """Write the project, and print what to do next.

    Args:
        arguments: of the command: the folder.

    Returns:
        0, or 2 if there is something already, or the folder cannot be written to.
    """
    parser = argparse.ArgumentParser(
        "lightning-ort new",
        description="Write a project to start from: model, data, configurations, a sweep, and tests of them.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="which is new, or empty")
    folder = parser.parse_args(arguments).folder
    mistake = _write(folder)
    if mistake is not None:
        print(mistake, file=sys.stderr)
        return 2
    print(f"Wrote {folder}; its README.md says what is where. Next:\n")
    print(f"cd {shlex.quote(str(folder))}\npip install -r requirements.txt")
    print("lightning-ort fit --config configs/defaults.yaml")
    return 0


def template() -> Path:
    """The folder of the template: in the package as installed, among the examples in a clone."""
    installed = _PACKAGE / "_template"
    return installed if installed.is_dir() else _PACKAGE.parent / "examples" / "template"


def _write(folder: Path) -> Mistake | None:
    expected = "a folder that is not there yet, or is empty"
    if folder.exists() and not folder.is_dir():
        return Mistake(f"{folder} is a file", expected, "give another name")
    if folder.is_dir() and any(folder.iterdir()):
        held = listed(sorted(os.listdir(folder)), 3)
        return Mistake(f"{folder} is not empty: it has {held}", expected, "give another name, or empty the folder")
    try:
        shutil.copytree(template(), folder, ignore=shutil.ignore_patterns(*_NOT_COPIED), dirs_exist_ok=True)
    except OSError as error:
        return Mistake(f"{folder} cannot be written: {error}", "a folder that can be written to", "give another name")
    return None
