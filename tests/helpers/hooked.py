"""Torch optimizers whose updates this package makes."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from lightning_ort.optim.torch_optim import StepHook
from lightning_ort.report import OptimizerReport
from lightning_ort.runtime.config import RuntimeConfig


def hook(
    optimizer: Optimizer, mode: Any = "ort", *, verify: bool = True, refuse: bool = False
) -> tuple[StepHook, OptimizerReport]:
    """Hooked, and the report."""
    report = OptimizerReport(type(optimizer).__name__)
    made = StepHook(
        optimizer, mode, RuntimeConfig(), verify=verify, refuse=refuse, report=report, announce=lambda text: None
    )
    return made, report
