"""What Lightning sees: strategy, accelerator, precision plug-in."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Let ``Trainer(strategy="ort")`` and ``Trainer(accelerator="ort")`` find what they name."""
    from lightning_ort.lightning.accelerator import ORTAccelerator
    from lightning_ort.lightning.strategy import ORTStrategy
    from lightning_ort.lightning_packages import everywhere

    for registry in everywhere("strategies:StrategyRegistry"):
        if ORTStrategy.strategy_name not in registry:
            ORTStrategy.register_strategies(registry)
    for registry in everywhere("accelerators:AcceleratorRegistry"):
        if ORTAccelerator.name() not in registry:
            ORTAccelerator.register_accelerators(registry)
