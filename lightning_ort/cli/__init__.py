"""The command ``lightning-ort``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_ort._version import __version__
from lightning_ort.cli.mistakes import COMMANDS, unknown_command
from lightning_ort.files.output import no_more_output

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
    """``lightning-ort fit|validate|test|predict|examine|bench|doctor|cache|new ...``.

    Args:
        arguments: of the command; by default those of the process.

    Returns:
        The exit status, 0 if done; for ``examine``, all steps run in ONNX Runtime; for ``doctor``, nothing is wrong.
        It is 1 if ``examine`` or ``doctor`` has found something or a strategy has failed in ``bench``, 2 if the command
        could not be executed, 141 if who reads the output has gone, as shells say of what a closed pipe has ended.

    Raises:
        SystemExit: for ``--help``, and with status 2 for arguments and configurations that are wrong.
    """
    try:
        status = _executed(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        no_more_output()
        return 141
    return status


def _executed(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        _parser().print_help(sys.stderr)
        return 2
    command = given[0]
    # what follows imports no more than it needs: neither torch nor Lightning, if it can do without
    if command in ("-h", "--help"):
        _parser().print_help()
        return 0
    if command == "--version":
        print(__version__)
        return 0
    if command == "doctor":
        from lightning_ort.cli.doctor import doctor

        return doctor(given[1:])
    if command == "cache":
        from lightning_ort.cli.cache import cache

        return cache(given[1:])
    if command == "new":
        from lightning_ort.cli.new import new

        return new(given[1:])
    # LightningCLI takes a configuration in front of the command, too
    if command not in COMMANDS and not command.startswith("-"):
        print(unknown_command(command), file=sys.stderr)
        return 2
    return _lightning_cli(given, from_process=arguments is None)


def _parser() -> argparse.ArgumentParser:
    """The commands and what they are for; the options of each are in a parser of its own."""
    parser = argparse.ArgumentParser(
        "lightning-ort",
        description="Train unchanged LightningModules in ONNX Runtime.",
        epilog="lightning-ort fit --help lists the options of fit, and so on. fit to bench take those of LightningCLI: "
        "lightning-ort fit --config config.yaml",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__, help="print the version")
    commands = parser.add_subparsers(title="commands", required=True)
    for name, purpose in COMMANDS.items():
        commands.add_parser(name, help=purpose)
    return parser


def _lightning_cli(given: list[str], from_process: bool) -> int:
    problem = _problem(needs_onnxruntime=not {"-h", "--help"} & set(given))
    if problem:
        print(f"{problem}\nSee also: lightning-ort doctor", file=sys.stderr)
        return 2
    from lightning_ort.cli.lightning_cli import ORTCLI

    # configurations name classes of the project in whose folder the command is called
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    return ORTCLI(args=None if from_process else given).status


def _problem(needs_onnxruntime: bool) -> str | None:
    """What stands in the way of any training, with the command that mends it."""
    try:
        from lightning.pytorch.cli import _JSONARGPARSE_SIGNATURES_AVAILABLE
    except ImportError as error:
        return f"Lightning cannot be imported: {error}"

    from lightning_ort.environment import OnnxRuntimeImportError, require_onnxruntime

    if not _JSONARGPARSE_SIGNATURES_AVAILABLE:
        wanted = _JSONARGPARSE_SIGNATURES_AVAILABLE.requirement
        return (
            f"The command line needs the extra [cli] of this package, {wanted}, which is not installed: "
            f'pip install "{wanted}"'
        )
    if needs_onnxruntime:
        try:
            require_onnxruntime()
        except OnnxRuntimeImportError as error:
            return str(error)
    return None
