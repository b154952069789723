"""Train unchanged LightningModules in ONNX Runtime."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ort import _moved
from lightning_ort._version import __version__

if TYPE_CHECKING:
    from lightning_ort import amp, ondevice, optim
    from lightning_ort.checkpoints import ORTCheckpointIO
    from lightning_ort.errors import (
        CheckpointError,
        CompilationError,
        ExportError,
        IndexOutOfRangeError,
        MismatchError,
        ProviderError,
        RankError,
        RefusedValueError,
        UnsupportedError,
    )
    from lightning_ort.export import ExportedModel, ORTExport, export_onnx
    from lightning_ort.lightning.accelerator import ORTAccelerator
    from lightning_ort.lightning.examine import Examination, examine
    from lightning_ort.lightning.fabric import ORTFabricStrategy
    from lightning_ort.lightning.precision import ORTPrecision
    from lightning_ort.lightning.strategy import ORTStrategy
    from lightning_ort.ondevice import ORTArtifacts
    from lightning_ort.report import Report, StepReport
    from lightning_ort.trainer import ORTTrainer, ORTTrainerOptions, PropagateCastOpsStrategy, TrainStepInfo
    from lightning_ort.training_session import TrainingParameters, TrainingSession
    from lightning_ort.training_session.gradient_graph import GradientGraphBuilder

__all__ = [
    "CheckpointError",
    "CompilationError",
    "Examination",
    "ExportError",
    "ExportedModel",
    "GradientGraphBuilder",
    "IndexOutOfRangeError",
    "MismatchError",
    "ORTAccelerator",
    "ORTArtifacts",
    "ORTCheckpointIO",
    "ORTExport",
    "ORTFabricStrategy",
    "ORTPrecision",
    "ORTStrategy",
    "ORTTrainer",
    "ORTTrainerOptions",
    "PropagateCastOpsStrategy",
    "ProviderError",
    "RankError",
    "RefusedValueError",
    "Report",
    "StepReport",
    "TrainStepInfo",
    "TrainingParameters",
    "TrainingSession",
    "UnsupportedError",
    "__version__",
    "amp",
    "examine",
    "export_onnx",
    "ondevice",
    "optim",
]

_MODULES = ("amp", "ondevice", "optim")
_NAMES = {
    "checkpoints": ("ORTCheckpointIO",),
    "errors": (
        "CheckpointError", "CompilationError", "ExportError", "IndexOutOfRangeError", "MismatchError", "ProviderError",
        "RankError", "RefusedValueError", "UnsupportedError",
    ),
    "export": ("ExportedModel", "ORTExport", "export_onnx"),
    "lightning.accelerator": ("ORTAccelerator",),
    "lightning.examine": ("Examination", "examine"),
    "lightning.fabric": ("ORTFabricStrategy",),
    "lightning.precision": ("ORTPrecision",),
    "lightning.strategy": ("ORTStrategy",),
    "ondevice": ("ORTArtifacts",),
    "report": ("Report", "StepReport"),
    "trainer": ("ORTTrainer", "ORTTrainerOptions", "PropagateCastOpsStrategy", "TrainStepInfo"),
    "training_session": ("TrainingParameters", "TrainingSession"),
    "training_session.gradient_graph": ("GradientGraphBuilder",),
}  # fmt: skip
"""Module to what is imported from it when it is asked for."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _is_the_command() -> bool:
    """Whether this process is ``lightning-ort`` or ``python -m lightning_ort``.

    It imports what it is asked for when it knows that; all others import this package for the strategy.
    """
    if sys.argv[:1] == ["-m"]:  # Python looks for the module, whose name stands before the arguments
        return sys.orig_argv[-len(sys.argv)].removeprefix("-m") == __name__
    return Path(sys.argv[0]).stem == "lightning-ort" if sys.argv else False


_moved.install()
if not _is_the_command():
    from lightning_ort.lightning import register

    register()
