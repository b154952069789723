"""The command ``lightning-ort``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_ort._version import __version__

if TYPE_CHECKING:
    from lightning_ort.cli.lightning_cli import ORTCLI

__all__ = ["ORTCLI", "main"]


def __getattr__(name: str) -> Any:
    # LightningCLI needs jsonargparse, without which the doctor works as well
    if name == "ORTCLI":
        from lightning_ort.cli.lightning_cli import ORTCLI

        return ORTCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(arguments: Sequence[str] | None = None) -> int:
    """``lightning-ort fit|validate|test|predict|examine|bench|doctor|cache ...``.

    Args:
        arguments: of the command; by default those of the process.

    Returns:
        The exit status, 0 if done; for ``examine``, all steps run in ONNX Runtime; for ``doctor``, nothing is wrong.
        It is 1 if ``examine`` or ``doctor`` has found something or a strategy has failed in ``bench``, 2 if the command
        could not be executed.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["doctor"]:
        from lightning_ort.cli.doctor import doctor

        return doctor(given[1:])
    if given[:1] == ["cache"]:
        from lightning_ort.cli.cache import cache

        return cache(given[1:])
    if given == ["--version"]:
        print(__version__)
        return 0
    if not {"-h", "--help"} & set(given):
        problem = _problem()
        if problem:
            print(f"{problem}\nSee also: lightning-ort doctor", file=sys.stderr)
            return 2
    from lightning_ort.cli.lightning_cli import ORTCLI

    # configurations name classes of the project in whose folder the command is called
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    return ORTCLI(args=None if arguments is None else given).status


def _problem() -> str | None:
    """What stands in the way of any training, with the command that mends it."""
    from lightning.pytorch.cli import _JSONARGPARSE_SIGNATURES_AVAILABLE

    from lightning_ort.environment import OnnxRuntimeImportError, require_onnxruntime

    if not _JSONARGPARSE_SIGNATURES_AVAILABLE:
        wanted = _JSONARGPARSE_SIGNATURES_AVAILABLE.requirement
        return f'The command line needs {wanted}, which is not installed: pip install "{wanted}"'
    try:
        require_onnxruntime()
    except OnnxRuntimeImportError as error:
        return str(error)
    return None
