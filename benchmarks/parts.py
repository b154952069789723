"""What is measured: the parts of the benchmarks, and the reports they give."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.everyday import PROJECTS
from benchmarks.models import MODELS
from benchmarks.projects import COLUMNS, measure_project, project_rows
from lightning_ort.bench.machine import described
from lightning_ort.bench.measure import Settings, measure
from lightning_ort.bench.table import step_columns, step_rows

__all__ = ["LAYERS", "PARTS", "STEPS", "STRATEGIES", "columns_of", "rows_of", "run_part"]

STRATEGIES = ("auto", "compile", "ort")
LAYERS = (4, 12, 24, 48)
PARTS = {
    "models": "the steps of eight models, in which nothing is logged",
    "logged": "the same steps with self.log",
    "unfused": "the same steps with AdamW as most write it, without fused=True",
    "growth": f"a narrow GPT of {', '.join(map(str, LAYERS))} layers: step, compile time, memory",
    "everyday": "six projects from start to end, first run and second",
}
STEPS = ("models", "logged", "unfused")
"""the parts that are about the eight models"""


def run_part(
    part: str,
    precision: str,
    strategies: Sequence[str],
    settings: Settings,
    *,
    models: Sequence[str] = tuple(MODELS),
    layers: Sequence[int] = LAYERS,
    projects: Sequence[str] = tuple(PROJECTS),
    seconds: float = 20.0,
    accelerator: str = "cpu",
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Measure one of :data:`PARTS`; returns its report, ready for JSON.

    Args:
        part: name of it.
        precision: of the Trainer.
        strategies: names.
        settings: how long steps are measured.
        models: of those of :data:`STEPS`.
        layers: of ``growth``.
        projects: of ``everyday``.
        seconds: of a project's fit under ``auto``.
        accelerator: of the Trainer, in all parts but ``everyday``.
        say: is told what is measured next.
    """
    if part == "everyday":
        chosen = {"strategies": list(strategies), "precision": precision, "seconds": seconds}
        report = {"part": part, **described(**chosen)}
        for project in projects:
            say(f"{project}: {PROJECTS[project]}")
            report["results"] += measure_project(project, strategies, precision, seconds, settings.threads)
        return report
    chosen = {**dataclasses.asdict(settings), "strategies": list(strategies), "precision": precision}
    chosen["accelerator"] = accelerator
    report = {"part": part, **described(**chosen)}
    if part in STEPS:
        for model in models:
            say(f"{model}: {MODELS[model]}")
            command = _command(model, precision, accelerator, part)
            report["results"] += measure(model, command, strategies, settings)
        return report
    for count in layers:
        say(f"GPT of {count} layers")
        command = _command("narrow_gpt", precision, accelerator, part, layers=count)
        report["results"] += [
            {**result, "layers": count} for result in measure(f"{count} layers", command, strategies, settings)
        ]
    return report


def _command(model: str, precision: str, accelerator: str, part: str, **options: Any) -> list[str]:
    job = {"model": model, "precision": precision, "accelerator": accelerator, "options": options}
    job |= {"logs": part == "logged", "fused": None if part == "unfused" else True}
    return [sys.executable, "-m", "benchmarks.child", json.dumps(job)]


def columns_of(part: str) -> tuple[str, ...]:
    """Titles of the columns of :func:`rows_of`."""
    if part == "growth":
        return (*step_columns()[:-3], "above start")
    return COLUMNS if part == "everyday" else step_columns()


def rows_of(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of a report."""
    results = report["results"]
    if report["part"] == "everyday":
        return list(project_rows(results))
    rows = list(step_rows(results))
    if report["part"] in STEPS:
        return rows
    above = [f"{r['above_start_mb']:.0f} MB" if "above_start_mb" in r else "" for r in results]
    return [(*row[:-3], memory) for row, memory in zip(rows, above, strict=True)]
