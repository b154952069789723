"""The updates of torch optimizers, made by ONNX Runtime on the optimizers' own states."""

from __future__ import annotations

from lightning_ort.optim.torch_optim.hook import HookedOptimizers, Mode, StepHook
from lightning_ort.optim.torch_optim.members import NeedsTorch
from lightning_ort.optim.torch_optim.stepper import OptimizerStepper

__all__ = ["HookedOptimizers", "Mode", "NeedsTorch", "OptimizerStepper", "StepHook"]
