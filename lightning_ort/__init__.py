"""Train unchanged LightningModules in ONNX Runtime."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_ort import _moved
from lightning_ort._version import __version__
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
from lightning_ort.lightning.accelerator import ORTAccelerator
from lightning_ort.lightning.precision import ORTPrecision
from lightning_ort.lightning.strategy import ORTStrategy
from lightning_ort.lightning_packages import everywhere
from lightning_ort.report import Report, StepReport

if TYPE_CHECKING:
    from lightning_ort import amp, ondevice, optim
    from lightning_ort.export import ExportedModel, ORTExport, export_onnx
    from lightning_ort.lightning.examine import Examination, examine
    from lightning_ort.ondevice import ORTArtifacts
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

# not needed by the strategy, and imported when they are asked for
_MODULES = {"amp": "lightning_ort.amp", "ondevice": "lightning_ort.ondevice", "optim": "lightning_ort.optim"}
_CLASSES = dict.fromkeys(
    ("ORTTrainer", "ORTTrainerOptions", "PropagateCastOpsStrategy", "TrainStepInfo"), "lightning_ort.trainer"
)
_CLASSES |= dict.fromkeys(("TrainingParameters", "TrainingSession"), "lightning_ort.training_session")
_CLASSES |= dict.fromkeys(("ExportedModel", "ORTExport", "export_onnx"), "lightning_ort.export")
_CLASSES |= dict.fromkeys(("Examination", "examine"), "lightning_ort.lightning.examine")
_CLASSES["GradientGraphBuilder"] = "lightning_ort.training_session.gradient_graph"
_CLASSES["ORTArtifacts"] = "lightning_ort.ondevice"


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _CLASSES:
        return getattr(importlib.import_module(_CLASSES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


for _registry in everywhere("strategies:StrategyRegistry"):
    ORTStrategy.register_strategies(_registry)
for _registry in everywhere("accelerators:AcceleratorRegistry"):
    if ORTAccelerator.name() not in _registry:
        ORTAccelerator.register_accelerators(_registry)
_moved.install()
