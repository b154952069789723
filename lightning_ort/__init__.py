"""Train unchanged LightningModules in ONNX Runtime."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_ort._version import __version__
from lightning_ort.errors import CompilationError, MismatchError, ProviderError, UnsupportedError
from lightning_ort.report import Report, StepReport
from lightning_ort.strategy import ORTStrategy

__all__ = [
    "CompilationError",
    "MismatchError",
    "ORTStrategy",
    "ProviderError",
    "Report",
    "StepReport",
    "UnsupportedError",
    "__version__",
]

if ORTStrategy.strategy_name not in StrategyRegistry:
    ORTStrategy.register_strategies(StrategyRegistry)
