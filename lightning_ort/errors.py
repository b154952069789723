"""Exceptions raised by lightning_ort."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CompilationError",
    "DamagedFileError",
    "ExportError",
    "IndexOutOfRangeError",
    "MismatchError",
    "ProviderError",
    "RankError",
    "RefusedValueError",
    "UnsupportedError",
]


class CheckpointError(ValueError):
    """A file is no checkpoint, or damaged, or that of another model or optimizer; nothing has been changed."""


class DamagedFileError(CheckpointError, OSError):
    """A file is cut short, damaged, or made to do harm: it holds what no program that writes such files puts there.

    An ``OSError`` too, as which libraries report what they cannot read.
    """


class CompilationError(RuntimeError):
    """A step could not be turned into an ONNX graph that ONNX Runtime accepts."""


class UnsupportedError(CompilationError):
    """ONNX Runtime cannot run a part of a step and ``on_unsupported="error"`` forbids running it in torch."""


class MismatchError(CompilationError):
    """The first run of a graph gave other numbers than torch; nothing was applied, and no file written."""


class ExportError(RuntimeError):
    """A module cannot be written as an ONNX file that does what the module does; there is no file."""


class ProviderError(ValueError):
    """A requested execution provider is missing from this ONNX Runtime, or the session did not get it."""


class RankError(RuntimeError):
    """Another of the processes that train together has failed or ended; the message says which one, and why."""


class RefusedValueError(RuntimeError):
    """A step met values that one of its operators refuses, as torch's does; nothing was updated.

    ``__cause__`` is the error of ONNX Runtime.
    """


class IndexOutOfRangeError(RefusedValueError, IndexError):
    """An index or a class label is out of range; nothing was updated.

    Eager raises ``IndexError`` or ``RuntimeError`` for it, depending on the operator: this is both.
    """
