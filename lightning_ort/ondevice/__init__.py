"""On-device training: artifacts, and the classes that train them, on any ONNX Runtime."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_ort.environment import require_onnxruntime

if TYPE_CHECKING:
    from lightning_ort.ondevice import onnxblock as onnxblock
    from lightning_ort.ondevice.artifacts import generate_artifacts
    from lightning_ort.ondevice.checkpoint import CheckpointState, Parameter, Parameters, Properties
    from lightning_ort.ondevice.exchange import copy_from_torch, copy_to_torch
    from lightning_ort.ondevice.generation.objectives import LossType
    from lightning_ort.ondevice.module import Module
    from lightning_ort.ondevice.optimizer import LinearLRScheduler, Optimizer
    from lightning_ort.ondevice.optimizer_config import OptimizerConfig, OptimType
    from lightning_ort.ondevice.trained import ORTArtifacts

__all__ = [
    "CheckpointState",
    "LinearLRScheduler",
    "LossType",
    "Module",
    "ORTArtifacts",
    "OptimType",
    "Optimizer",
    "OptimizerConfig",
    "Parameter",
    "Parameters",
    "Properties",
    "copy_from_torch",
    "copy_to_torch",
    "generate_artifacts",
    "onnxblock",
]

_MODULES = dict.fromkeys(("CheckpointState", "Parameter", "Parameters", "Properties"), "checkpoint")
_MODULES |= {
    "LinearLRScheduler": "optimizer",
    "LossType": "generation.objectives",
    "Module": "module",
    "ORTArtifacts": "trained",
    "OptimType": "optimizer_config",
    "Optimizer": "optimizer",
    "OptimizerConfig": "optimizer_config",
    "copy_from_torch": "exchange",
    "copy_to_torch": "exchange",
    "generate_artifacts": "artifacts",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        # the modules need ONNX Runtime, whose absence shall be explained
        require_onnxruntime()
        return getattr(importlib.import_module(f"lightning_ort.ondevice.{_MODULES[name]}"), name)
    if name == "onnxblock":
        require_onnxruntime()
        return importlib.import_module("lightning_ort.ondevice.onnxblock")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
