"""What the pictures show: numbers of a report, without a library that draws."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from benchmarks.parts import STEPS
from benchmarks.projects import MINUTE, compared, of_a_minute
from lightning_ort.bench.advice import break_even
from lightning_ort.bench.contestants import BASELINE

__all__ = ["Panel", "digest", "panels_of"]


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: above it.
        labels: along its horizontal axis.
        series: name to one value per label; ``None`` where there is none.
        kind: bars beside each other, or lines, for which ``labels`` are numbers.
        at_one: the value 1 is marked.
        logarithmic: its vertical axis.
    """

    title: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    kind: Literal["bars", "lines"] = "bars"
    at_one: bool = False
    logarithmic: bool = False


def panels_of(report: Mapping[str, Any]) -> list[Panel]:
    """The panels of a report's picture."""
    results = [r for r in report["results"] if "error" not in r]
    panels = {**dict.fromkeys(STEPS, _models), "growth": _growth, "everyday": _everyday}
    return list(panels[report["part"]](results))


def digest(panels: Sequence[Panel]) -> str:
    """Of all that is drawn; a picture carries it, so that it can be seen what it was made of."""
    text = json.dumps([dataclasses.asdict(panel) for panel in panels], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _series(
    results: Sequence[Mapping[str, Any]], key: str, value: Any, skip: str = ""
) -> dict[str, list[float | None]]:
    labels = list(dict.fromkeys(str(r[key]) for r in results))
    found: dict[str, dict[str, float | None]] = {}
    for r in results:
        if r["strategy"] != skip:
            name = f"{r['strategy']}, {r['run']}" if "run" in r else r["strategy"]
            number = value(r)
            found.setdefault(name, {})[str(r[key])] = None if number is None else float(f"{number:.3g}")
    return {name: [row.get(label) for label in labels] for name, row in found.items()}


def _models(results: Sequence[Mapping[str, Any]]) -> Iterator[Panel]:
    labels = list(dict.fromkeys(r["model"] for r in results))
    baselines = {r["model"]: r for r in results if r["strategy"] == BASELINE}
    speeds = _series(results, "model", lambda r: r["speed"] and r["speed"]["median"], BASELINE)
    yield Panel("Speed of a step, auto = 1", labels, speeds, at_one=True)
    steps = _series(results, "model", lambda r: break_even(r, baselines[r["model"]]), BASELINE)
    yield Panel("Steps until compiling has paid (none: never)", labels, steps, logarithmic=True)


def _growth(results: Sequence[Mapping[str, Any]]) -> Iterator[Panel]:
    labels = list(dict.fromkeys(str(r["layers"]) for r in results))
    for title, key in (
        ("Step in ms, by layers", "step_ms"),
        ("Compiling in s, by layers", "compile_s"),
        ("Memory above the start in MB, by layers", "above_start_mb"),
    ):
        yield Panel(title, labels, _series(results, "layers", lambda r, key=key: r[key]), "lines")


def _everyday(results: Sequence[Mapping[str, Any]]) -> Iterator[Panel]:
    labels = list(dict.fromkeys(r["model"] for r in results))
    rows = [{**r, "ratio": of_a_minute(r, baseline)} for r, baseline in compared(results) if baseline is not None]
    ratios = _series(rows, "model", lambda r: r["ratio"], BASELINE)
    yield Panel(f"Time of a script whose fit takes auto {MINUTE:.0f} s, auto = 1", labels, ratios, at_one=True)
    seconds = _series(results, "model", lambda r: r["compiler"]["compile_seconds"], BASELINE)
    yield Panel("Compiling in s", labels, seconds)
