"""What Lightning sees: strategy, accelerator, precision plug-in."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Let ``strategy="ort"`` of Trainer and Fabric, and ``Trainer(accelerator="ort")``, find what they name."""
    from lightning_ort.lightning.accelerator import ORTAccelerator
    from lightning_ort.lightning.fabric import ORTFabricStrategy
    from lightning_ort.lightning.strategy import ORTStrategy
    from lightning_ort.lightning_packages import everywhere, everywhere_in_fabric

    for registry in everywhere("strategies:StrategyRegistry"):
        if ORTStrategy.strategy_name not in registry:
            ORTStrategy.register_strategies(registry)
    for registry in everywhere_in_fabric("strategies:STRATEGY_REGISTRY"):
        if ORTFabricStrategy.strategy_name not in registry:
            ORTFabricStrategy.register_strategies(registry)
    for registry in everywhere("accelerators:AcceleratorRegistry"):
        if ORTAccelerator.name() not in registry:
            ORTAccelerator.register_accelerators(registry)
