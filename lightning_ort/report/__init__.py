"""What ran where: graphs, recompilations, graph breaks and operators that stayed in torch, per step function."""

from __future__ import annotations

from lightning_ort.report.account import GraphBreak, GraphReport, InTorch, OptimizerReport, StepReport
from lightning_ort.report.figures import Figures
from lightning_ort.report.ranks import RankStep
from lightning_ort.report.report import Report

__all__ = ["Figures", "GraphBreak", "GraphReport", "InTorch", "OptimizerReport", "RankStep", "Report", "StepReport"]
