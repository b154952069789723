"""``python -m benchmarks``: step time, compile time and memory of the strategies, model by model."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import describe_machine, installed_versions
from benchmarks.measure import STRATEGIES, Settings, measure
from benchmarks.models import MODELS
from benchmarks.process import build_inductor_headers
from benchmarks.table import print_table

_RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table, write the file if asked to; returns what is written."""
    options = _parser().parse_args(arguments)
    settings = Settings.quick(options.threads) if options.quick else Settings(threads=options.threads)
    settings = dataclasses.replace(settings, precision=options.precision)
    if options.rounds:
        settings = dataclasses.replace(settings, rounds=options.rounds)
    # what is not a terminal counts as 80 columns wide, too few for the table
    console = Console(width=max(110, Console().width))
    started = datetime.datetime.now()
    report: dict[str, Any] = {
        "date": started.date().isoformat(),
        "machine": describe_machine(),
        "versions": installed_versions(),
        "settings": {**dataclasses.asdict(settings), "strategies": options.strategies},
        "results": [],
    }
    if "compile" in options.strategies:
        build_inductor_headers()
    for model in options.models:
        # a moving indicator would cost the time of the cores that are measured
        console.print(f"{model}: {MODELS[model]}", highlight=False)
        report["results"] += measure(model, options.strategies, settings)
    print_table(report, console)
    if options.output is not None:
        path: Path = options.output
        if path.suffix != ".json":
            path /= f"{started:%Y-%m-%d-%H%M}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"Wrote {path}", highlight=False)
    return report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL", help=", ".join(MODELS)
    )
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES), help="default: all")
    parser.add_argument("--rounds", type=int, help="turns of each strategy (default: 8)")
    parser.add_argument("--threads", type=int, help="threads of torch and ONNX Runtime (default: torch's choice)")
    parser.add_argument("--precision", default="32-true", help="of the Trainer, such as bf16-mixed (default: 32-true)")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works; figures mean nothing")
    parser.add_argument(
        "--output",
        type=Path,
        nargs="?",
        const=_RESULTS,
        metavar="PATH",
        help="write JSON: to this .json file, or to a file named after the date in this folder (benchmarks/results)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(any("error" in result for result in main()["results"]))
