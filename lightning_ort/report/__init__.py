"""What ran where: graphs, recompilations, graph breaks and operators that stayed in torch, per step function."""

from lightning_ort.report.account import GraphBreak, InTorch, OptimizerReport, Report, StepReport

__all__ = ["GraphBreak", "InTorch", "OptimizerReport", "Report", "StepReport"]
