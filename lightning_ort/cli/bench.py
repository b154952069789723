"""``lightning-ort bench``: the strategies side by side on the user's own module and data."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_ort.bench.advice import advice
from lightning_ort.bench.child import Child
from lightning_ort.bench.contestants import BASELINE, account, prepared, strategy_of
from lightning_ort.bench.machine import described
from lightning_ort.bench.measure import Settings, measure
from lightning_ort.bench.process import build_inductor_headers
from lightning_ort.bench.table import print_table, step_columns, step_rows, wide_console

__all__ = ["bench", "bench_flags", "train_in_turns"]


def bench(model: str, command: Sequence[str], precision: Any, strategies: Sequence[str], settings: Settings) -> int:
    """Measure, print the table and which strategy to use.

    Args:
        model: name of the module.
        command: starts a training that takes turns.
        precision: of the Trainer, for the caption.
        strategies: names of :data:`~lightning_ort.bench.contestants.STRATEGIES`; ``auto`` is measured in any case.
        settings: how long.

    Returns:
        The exit status: 0, or 1 where a strategy failed, or 2 where ``auto`` did.
    """
    names = [BASELINE, *(s for s in strategies if s != BASELINE)]
    console = wide_console()
    report = described(precision=str(precision or "32-true"))
    if any(name in names for name in ("compile", "ort+inductor")):
        build_inductor_headers()
    report["results"] = results = measure(model, command, names, settings)
    failed = {r["strategy"]: r["error"] for r in results if "error" in r}
    if BASELINE in failed:
        print(f"The training fails, whatever the strategy: {failed[BASELINE]}", file=sys.stderr)
        return 2
    print_table(step_columns(), list(step_rows(results)), report, console)
    console.print(advice(results), soft_wrap=True)
    return 1 if failed else 0


def bench_flags(given: Mapping[str, Any], child: Child, folder: str) -> dict[str, Any]:
    """Flags of a Trainer that trains in turns without an end and writes nothing.

    Args:
        given: flags of the user, of which the others stay.
        child: whose turns they are.
        folder: where anything that is written all the same would go.
    """
    return {
        "strategy": strategy_of(child.strategy, given.get("strategy")),
        "callbacks": [child.turns],
        "logger": False,
        "profiler": None,
        "min_epochs": None,
        "min_steps": None,
        "max_time": None,
        "fast_dev_run": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }


def train_in_turns(
    trainer: Trainer, module: LightningModule, datamodule: LightningDataModule | None, child: Child
) -> None:
    """Train as the parent asks for, in a Trainer that has :func:`bench_flags`."""
    # callbacks of the module would stop the fit, or write
    module.configure_callbacks = list  # type: ignore[method-assign]
    trainer.fit(prepared(module, child.strategy), datamodule=datamodule)
    child.end(account(trainer, child.strategy))
