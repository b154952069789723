"""One running ``Trainer.fit`` that works only when it is its turn.

``python -m benchmarks.child '{"model": ..., "strategy": ..., "threads": ..., "precision": ...}'`` reads one JSON object
a line from standard input, ``{"seconds": ..., "steps": ...}``, trains at least so long and so many steps, and answers
with ``{"times": [seconds of each step]}`` on standard output. When its input ends it stops training and answers with
what it knows about itself: peak memory, threads, what was compiled. All else that is printed goes to standard error.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from benchmarks.models import load

_BATCHES = 8


class Turns(Callback):
    """Holds the fit until a command arrives, and times the steps of each turn.

    A step lasts from one ``on_train_batch_start`` to the next.
    """

    def __init__(self, commands: TextIO, replies: TextIO) -> None:
        self._commands, self._replies = commands, replies
        self._command: dict[str, Any] | None = None
        self._starts: list[float] = []

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._wait(trainer)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        starts = self._starts
        starts.append(now)
        command = self._command
        if command and len(starts) > command["steps"] and now - starts[0] >= command["seconds"]:
            self.answer({"times": [end - start for start, end in itertools.pairwise(starts)]})
            self._wait(trainer)
            # the time of waiting belongs to no step
            self._starts = [time.perf_counter()]

    def _wait(self, trainer: Trainer) -> None:
        line = self._commands.readline()
        self._command = json.loads(line) if line else None
        if self._command is None:
            trainer.should_stop = True

    def answer(self, reply: dict[str, Any]) -> None:
        """Send one line."""
        print(json.dumps(reply), file=self._replies, flush=True)


class Batches:
    """Batches without end, made beforehand so that no loading is timed."""

    def __init__(self, model: str) -> None:
        generator = torch.Generator().manual_seed(0)
        make_batch = load(model).make_batch
        self._batches = [make_batch(generator) for _ in range(_BATCHES)]

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self._batches)


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # ru_maxrss would also count the memory of the process that started this one
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def compiled(trainer: Trainer, strategy: str) -> dict[str, Any]:
    """What the compiler says about the training step."""
    if strategy == "ort":
        report = trainer.strategy.report()["training_step"]
        return {
            "compile_seconds": report.compile_seconds,
            "graphs": report.graphs,
            "graphs_in_torch": report.graphs_in_torch,
            "measured_ms": [dict(times) for times in report.measured],
            "recompilations": len(report.recompilations),
            "graph_breaks": [f"{b.reason} ({b.source})" for b in report.graph_breaks],
            "in_torch": [f"{t.what}: {t.reason}" for t in report.in_torch],
        }
    if strategy == "compile":
        from torch._dynamo.utils import counters

        breaks = [reason.splitlines()[0] for reason in counters["graph_break"]]
        return {"graphs": counters["stats"]["unique_graphs"], "graph_breaks": breaks}
    return {}


def train(model: str, strategy: str, precision: Any, turns: Turns) -> dict[str, Any]:
    """Train until there are no more turns; returns what the compiler did."""
    if strategy == "ort":
        import lightning_ort  # noqa: F401  (registers the strategy)
    seed_everything(0, verbose=False)
    module = load(model).make_module()
    trainer = Trainer(
        strategy="ort" if strategy == "ort" else "auto",
        accelerator="cpu",
        precision=precision,
        max_epochs=-1,
        callbacks=[turns],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if strategy == "compile":
        # Dynamo fails on Lightning's log (2.6.6 with torch 2.13), so it has to be kept outside of the graph
        module.log = torch.compiler.disable(module.log)
        module = torch.compile(module)
    trainer.fit(module, Batches(model))
    return compiled(trainer, strategy)


def main() -> None:
    settings = json.loads(sys.argv[1])
    # whatever anyone prints must not mix with the replies
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    turns = Turns(sys.stdin, replies)
    details = train(settings["model"], settings["strategy"], settings["precision"], turns)
    turns.answer({"peak_bytes": peak_memory(), "threads": torch.get_num_threads(), "compiler": details})


if __name__ == "__main__":
    main()
