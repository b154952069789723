"""The updates of torch optimizers, made by ONNX Runtime on the optimizers' own states."""

from __future__ import annotations

from lightning_ort.optimizer_steps.hook import Mode, StepHook
from lightning_ort.optimizer_steps.hooks import StepHooks
from lightning_ort.optimizer_steps.members import InTorch
from lightning_ort.optimizer_steps.stepper import OptimizerStepper

__all__ = ["InTorch", "Mode", "OptimizerStepper", "StepHook", "StepHooks"]
