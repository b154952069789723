"""What Lightning sees: strategy, accelerator, precision plug-in."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Let ``Trainer(strategy="ort")`` and ``Trainer(accelerator="ort")`` find what they name."""
    from lightning.pytorch.accelerators import AcceleratorRegistry
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_ort.lightning.accelerator import ORTAccelerator
    from lightning_ort.lightning.strategy import ORTStrategy

    if ORTStrategy.strategy_name not in StrategyRegistry:
        ORTStrategy.register_strategies(StrategyRegistry)
    if ORTAccelerator.name() not in AcceleratorRegistry:
        ORTAccelerator.register_accelerators(AcceleratorRegistry)
