"""``python -m benchmarks``: steps, compile time, memory and whole projects under the strategies, side by side."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.everyday import PROJECTS
from benchmarks.models import MODELS
from benchmarks.page import path_of
from benchmarks.parts import LAYERS, PARTS, STEPS, STRATEGIES, columns_of, rows_of, run_part
from lightning_ort.bench.contestants import STRATEGIES as KNOWN
from lightning_ort.bench.measure import Settings
from lightning_ort.bench.process import build_inductor_headers
from lightning_ort.bench.table import print_table, wide_console

_PRECISIONS = dict.fromkeys(PARTS, ("32-true",)) | dict.fromkeys(("models", "logged"), ("32-true", "bf16-mixed"))


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print the tables, write the files if asked to; returns the reports."""
    options = _parser().parse_args(arguments)
    if options.save and _is_part_of_a_part(options):
        _parser().error("--save keeps whole parts, as the documentation shows them: use --output FOLDER")
    if options.accelerator != "cpu" and (options.save or "everyday" in options.only):
        _parser().error("--accelerator is for all parts but everyday, without --save: the documentation's are CPUs")
    settings = Settings.quick(options.threads) if options.quick else Settings(threads=options.threads)
    rounds = options.rounds or (settings.rounds if options.quick else None)
    console = wide_console()
    if "compile" in options.strategies:
        build_inductor_headers()
    reports = []
    for part in options.only:
        for precision in options.precision or _PRECISIONS[part]:
            report = run_part(
                part,
                precision,
                options.strategies,
                # deep networks are compiled for long, and their steps are long
                dataclasses.replace(settings, rounds=rounds or (4 if part == "growth" else 12)),
                models=options.models,
                layers=options.layers,
                projects=options.projects,
                seconds=0.1 if options.quick else options.seconds,
                accelerator=options.accelerator,
                # a moving indicator would cost the time of the cores that are measured
                say=console.print,
            )
            print_table(columns_of(part), rows_of(report), report, console)
            reports.append(report)
            folder = None if options.save else options.output
            if folder is not None or options.save:
                path = path_of(report) if folder is None else folder / path_of(report).name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(_without_folders(json.dumps(report, indent=1)) + "\n")
                console.print(f"Wrote {path}")
    return reports


def _without_folders(text: str) -> str:
    """Sources as they are called on any machine: from the project's folder, or that of the installed packages, on."""
    for folder in (sysconfig.get_path("purelib"), str(Path(__file__).parents[1])):
        text = text.replace(f"{folder}/", "")
    return text


def _is_part_of_a_part(options: argparse.Namespace) -> bool:
    chosen = (options.models, options.layers, options.projects, options.strategies)
    whole = (list(MODELS), list(LAYERS), list(PROJECTS), list(STRATEGIES))
    return options.quick or chosen != whole


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)

    def add(name: str, choices: Any, text: str) -> None:
        kind = type(next(iter(choices)))
        parser.add_argument(name, nargs="+", type=kind, choices=choices, default=list(choices), metavar="X", help=text)

    add("--only", PARTS, "; ".join(f"{name}: {text}" for name, text in PARTS.items()))
    add("--models", MODELS, f"of parts {', '.join(STEPS)}: {', '.join(MODELS)}")
    parser.add_argument("--layers", nargs="+", type=int, default=list(LAYERS), metavar="N", help="of part growth")
    add("--projects", PROJECTS, f"of part everyday: {', '.join(PROJECTS)}")
    parser.add_argument(
        "--strategies", nargs="+", choices=KNOWN, default=list(STRATEGIES), metavar="X", help=", ".join(KNOWN)
    )
    parser.add_argument("--rounds", type=int, help="turns of each strategy (default: 12, growth 4)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a project's fit with auto (default: 20)")
    parser.add_argument("--threads", type=int, help="threads of torch and ONNX Runtime (default: torch's choice)")
    parser.add_argument(
        "--precision",
        nargs="+",
        metavar="X",
        help="of the Trainer (default: 32-true, for models and logged also bf16-mixed)",
    )
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu", help="of the Trainer (default: cpu)")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works; figures mean nothing")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/, of which `python -m benchmarks.page` makes docs"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write files of the same names to another folder")
    return parser


if __name__ == "__main__":
    sys.exit(any("error" in result for report in main() for result in report["results"]))
