"""The side of a measured process: a running ``Trainer.fit`` that works only when it is its turn.

Its parent, :mod:`.process`, writes one JSON object a line to its standard input, ``{"seconds": ..., "steps": ...}``; it
trains at least so long and so many steps, and answers with ``{"times": [seconds of each step]}`` on standard output.
When its input ends it stops training and answers with what it knows about itself: memory, threads, what was compiled.
All else that is printed goes to standard error.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_ort.lightning.examine import EndlessFit

__all__ = ["JOB", "Child", "Turns", "peak_memory"]

JOB = "LIGHTNING_ORT_BENCH_JOB"
"""environment variable with what the parent asks for, as JSON: ``strategy``, ``threads``"""


class Turns(EndlessFit):
    """Holds the fit until a command arrives, and times the steps of each turn; nothing else ends the fit.

    A step lasts from one ``on_train_batch_start`` to the next, on a GPU until that has done its work.

    Attributes:
        started_bytes: resident memory when the fit began, imports, weights and data included.
    """

    def __init__(self, commands: TextIO, replies: TextIO) -> None:
        self._commands, self._replies = commands, replies
        self._command: dict[str, Any] | None = None
        self._starts: list[float] = []
        self.started_bytes = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.started_bytes = _resident_memory()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._wait(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        now = _now(trainer)
        starts = self._starts
        starts.append(now)
        command = self._command
        if command and len(starts) > command["steps"] and now - starts[0] >= command["seconds"]:
            self.answer({"times": [end - start for start, end in itertools.pairwise(starts)]})
            self._wait(trainer)
            # the time of waiting belongs to no step
            self._starts = [_now(trainer)]

    def _wait(self, trainer: Trainer) -> None:
        line = self._commands.readline()
        self._command = json.loads(line) if line else None
        if self._command is None:
            trainer.should_stop = True

    def answer(self, reply: dict[str, Any]) -> None:
        """Send one line."""
        print(json.dumps(reply), file=self._replies, flush=True)


def _now(trainer: Trainer) -> float:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize(trainer.strategy.root_device)
    return time.perf_counter()


class Child:
    """This process, where a parent measures it.

    Attributes:
        strategy: which one is to be measured, one of :data:`~.contestants.STRATEGIES`.
        turns: callback of the fit.
    """

    def __init__(self, strategy: str, threads: int | None) -> None:
        # whatever anyone prints must not mix with the replies
        replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        if threads:
            torch.set_num_threads(threads)
        self.strategy, self.turns = strategy, Turns(sys.stdin, replies)

    @classmethod
    def of_this_process(cls) -> Child | None:
        """What the parent asks for, if there is one; standard output is the parent's from now on."""
        job = os.environ.pop(JOB, None)
        return None if job is None else cls(**json.loads(job))

    def end(self, compiler: dict[str, Any]) -> None:
        """Answer after the training, with what the ``compiler`` did."""
        self.turns.answer({
            "peak_bytes": peak_memory(),
            "started_bytes": self.turns.started_bytes,
            "threads": torch.get_num_threads(),
            "compiler": compiler,
        })  # fmt: skip


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes."""
    # ru_maxrss would also count the memory of the process that started this one
    found = _status("VmHWM")
    if found is not None:
        return found
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _resident_memory() -> int:
    """Resident memory of this process, in bytes; where the system does not say, the largest so far."""
    found = _status("VmRSS")
    return peak_memory() if found is None else found


def _status(name: str) -> int | None:
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    (line,) = (line for line in status.read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])
