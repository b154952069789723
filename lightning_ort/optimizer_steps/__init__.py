"""The updates of torch optimizers, made by ONNX Runtime on the optimizers' own states."""

from __future__ import annotations

from lightning_ort.optimizer_steps.hooked_optimizers import HookedOptimizers
from lightning_ort.optimizer_steps.members import InTorch
from lightning_ort.optimizer_steps.step_hook import Mode, StepHook
from lightning_ort.optimizer_steps.stepper import OptimizerStepper

__all__ = ["HookedOptimizers", "InTorch", "Mode", "OptimizerStepper", "StepHook"]
