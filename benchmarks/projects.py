"""Everyday projects under each strategy, as a user waits for them: the whole script, first run and second."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lightning_ort.bench.contestants import BASELINE
from lightning_ort.bench.process import ChildFailed, empty_caches, last_words

__all__ = ["COLUMNS", "MINUTE", "compared", "measure_project", "of_a_minute", "project_rows"]

MINUTE = 60.0
COLUMNS = ("project", "strategy", "script", "ratio", "of a minute", "CPU", "compile", "graphs", "peak memory",
           "val_loss")  # fmt: skip


def measure_project(
    project: str, strategies: Sequence[str], precision: str, seconds: float, threads: int | None
) -> list[dict[str, Any]]:
    """Run ``project`` twice with each strategy, and with ``auto`` before and after those; returns one result per run.

    The first run of a strategy finds empty caches, the second those that the first has left.

    Args:
        project: name of it.
        strategies: names; the first run of ``auto`` decides how many epochs all train for.
        precision: of the Trainer.
        seconds: how long the fit of ``auto`` takes, at least.
        threads: torch's number of threads, which ONNX Runtime takes over; ``None`` leaves it to torch.
    """
    settings = {"project": project, "precision": precision, "threads": threads}
    length: dict[str, Any] = {"seconds": seconds}
    results = []
    for strategy in _in_turns(strategies):
        runs = ("cold", "warm") if strategy != BASELINE else ("again" if results else "cold",)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for run in runs:
                name = {"model": project, "strategy": strategy, "run": run}
                try:
                    found = _script({**settings, **length, "strategy": strategy}, Path(folder))
                except ChildFailed as error:
                    results.append({**name, "error": str(error)})
                    break
                results.append({**name, **found})
        if "error" in results[0]:
            break
        length = {"epochs": results[0]["epochs"]}
    return results


def _in_turns(strategies: Sequence[str]) -> Iterator[str]:
    """``auto`` first, and again after each other strategy: what else a machine does changes within minutes."""
    yield BASELINE
    for strategy in strategies:
        if strategy != BASELINE:
            yield strategy
            yield BASELINE


def _script(settings: Mapping[str, Any], caches: Path) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.project", json.dumps(settings)],
        capture_output=True,
        text=True,
        env={**os.environ, **empty_caches(caches)},
    )
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise ChildFailed(last_words(done.returncode, done.stderr))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"script_s": wall, "cpu_s": cpu, **json.loads(done.stdout.splitlines()[-1])}


def compared(results: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any] | None]]:
    """Each result, and what it is compared with: the runs of ``auto`` right before and after it, as one.

    The runs of ``auto`` are compared with the first one. ``None`` is for what has failed, or lost its counterpart.
    """
    for number, r in enumerate(results):
        autos = [
            (i, x)
            for i, x in enumerate(results)
            if x["model"] == r["model"] and x["strategy"] == BASELINE and "error" not in x
        ]
        if "error" in r or not autos:
            yield r, None
        elif r["strategy"] == BASELINE:
            yield r, autos[0][1]
        else:
            before, after = [x for i, x in autos if i < number][-1:], [x for i, x in autos if i > number][:1]
            yield r, _together([*before, *after])


def _together(autos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means = {key: sum(x[key] for x in autos) / len(autos) for key in ("script_s", "fit_s")}
    return {**means, "epoch_s": [seconds for x in autos for seconds in x["epoch_s"]]}


def of_a_minute(result: Mapping[str, Any], baseline: Mapping[str, Any]) -> float:
    """Time of the script, in that of ``baseline``, if the fit of the latter took a minute.

    Further epochs take the median of those that were measured; none are added to a fit that took a minute.
    """
    epochs = max(0.0, MINUTE - baseline["fit_s"]) / median(baseline["epoch_s"])
    mine, its = (r["script_s"] + epochs * median(r["epoch_s"]) for r in (result, baseline))
    return mine / its


def project_rows(results: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """One row per run, under :data:`COLUMNS`."""
    last = None
    for r, baseline in compared(results):
        name = "" if r["model"] == last else r["model"]
        last = r["model"]
        strategy = r["strategy"] if r["strategy"] == BASELINE else f"{r['strategy']}, {r['run']}"
        if baseline is None:
            yield (name, strategy, "failed", *[""] * (len(COLUMNS) - 3))
            continue
        compiler = r["compiler"]
        yield (
            name,
            strategy,
            f"{r['script_s']:.1f} s",
            f"{r['script_s'] / baseline['script_s']:.2f}",
            f"{of_a_minute(r, baseline):.2f}",
            f"{r['cpu_s']:.1f} s",
            f"{compiler['compile_seconds']:.1f} s" if compiler else "",
            str(compiler.get("graphs", "")),
            f"{r['peak_mb']:.0f} MB",
            f"{r['val_loss']:.3f}",
        )
