"""The strategies that are compared: how each is switched on, and what its compiler says afterwards."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_ort.lightning.strategy import ORTStrategy

__all__ = ["BASELINE", "STRATEGIES", "account", "prepared", "strategy_of"]

STRATEGIES = {
    "auto": "strategy='auto'",
    "compile": "strategy='auto' with torch.compile(module)",
    "ort": "strategy='ort'",
    "ort+inductor": "strategy=ORTStrategy(placement='fastest+inductor')",
}
"""name to how a user says it"""
BASELINE = "auto"


def strategy_of(name: str, given: Any = None) -> Any:
    """The Trainer's ``strategy`` for the contestant ``name``.

    Args:
        name: of :data:`STRATEGIES`.
        given: the user's own; its options are kept where it is an :class:`~lightning_ort.ORTStrategy`.
    """
    if name in ("auto", "compile"):
        return "auto"
    strategy = given if isinstance(given, ORTStrategy) else ORTStrategy()
    strategy._print_report = False
    if name == "ort+inductor":
        strategy._config = dataclasses.replace(strategy._config, placement="fastest+inductor")
    return strategy


def prepared(module: LightningModule, name: str) -> LightningModule:
    """``module``, compiled by inductor if that is what ``name`` stands for."""
    if name != "compile":
        return module
    from torch._dynamo.utils import set_compilation_metrics_limit

    # of which `account` makes a sum: only the last 64 would be there
    set_compilation_metrics_limit(10_000)
    # Dynamo fails on Lightning's log (2.6.6 with torch 2.13), so it has to be kept outside of the graph
    module.log = torch.compiler.disable(module.log)  # type: ignore[method-assign]
    return torch.compile(module)  # type: ignore[return-value]


def account(trainer: Trainer, name: str) -> dict[str, Any]:
    """What the compiler says about all steps that were run, ready for JSON; of ``auto`` nothing."""
    if isinstance(trainer.strategy, ORTStrategy):
        report = trainer.strategy.report()
        steps = list(report.values())
        return {
            "compile_seconds": sum(s.compile_seconds for s in steps)
            + sum(o.compile_seconds for o in report.optimizers),
            "graphs": sum(s.graphs for s in steps),
            "graphs_in_torch": sum(s.graphs_in_torch for s in steps),
            "as_they_are": [s.name for s in steps if s.as_it_is],
            "measured_ms": [dict(times) for s in steps for times in s.measured],
            "recompilations": sum(len(s.recompilations) for s in steps),
            "graph_breaks": [f"{b.reason} ({b.source})" for s in steps for b in s.graph_breaks],
            "in_torch": [f"{t.what}: {t.reason}" for s in steps for t in s.in_torch],
        }
    if name == "compile":
        from torch._dynamo.utils import counters, get_compilation_metrics

        return {
            "compile_seconds": sum(m.duration_us or 0 for m in get_compilation_metrics()) / 1e6,
            "graphs": counters["stats"]["unique_graphs"],
            "graph_breaks": [reason.splitlines()[0] for reason in counters["graph_break"]],
        }
    return {}
