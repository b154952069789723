"""On-device training: artifacts, and the classes that train them, on any ONNX Runtime."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_ort.environment import require_onnxruntime

if TYPE_CHECKING:
    from lightning_ort.ondevice.callback import ORTArtifacts
    from lightning_ort.ondevice.checkpoint import CheckpointState, Parameter, Parameters, Properties
    from lightning_ort.ondevice.exchange import copy_from_torch, copy_to_torch
    from lightning_ort.ondevice.generate import generate_artifacts
    from lightning_ort.ondevice.lr_scheduler import LinearLRScheduler
    from lightning_ort.ondevice.module import Module
    from lightning_ort.ondevice.optimizer import Optimizer
    from lightning_ort.ondevice.optimizers import OptimizerConfig

__all__ = [
    "CheckpointState",
    "LinearLRScheduler",
    "Module",
    "ORTArtifacts",
    "Optimizer",
    "OptimizerConfig",
    "Parameter",
    "Parameters",
    "Properties",
    "copy_from_torch",
    "copy_to_torch",
    "generate_artifacts",
]

_MODULES = dict.fromkeys(("CheckpointState", "Parameter", "Parameters", "Properties"), "checkpoint")
_MODULES |= {
    "LinearLRScheduler": "lr_scheduler",
    "Module": "module",
    "ORTArtifacts": "callback",
    "Optimizer": "optimizer",
    "OptimizerConfig": "optimizers",
    "copy_from_torch": "exchange",
    "copy_to_torch": "exchange",
    "generate_artifacts": "generate",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        # the modules need ONNX Runtime, whose absence shall be explained
        require_onnxruntime()
        return getattr(importlib.import_module(f"lightning_ort.ondevice.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
