"""Fits of several processes of which one is killed at a random moment, from outside.

    python -m tests.distributed.kills --count 20 --ranks 2 --launcher torchrun

Each must end: all other processes with an error that names the one, in time, and with a checkpoint that loads. Moments
are spread over the whole fit, from the start of the script's own code to the end.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_ort import ORTCheckpointIO

from .ranks import Forked, torchrun_variables

SCRIPT = Path(__file__).parent / "killed.py"
_TIMEOUT = 20.0
"""seconds that the process group waits"""
_IMPORTS = 120.0
"""seconds that a process may take until its own code begins"""
_LONGER = 40.0
"""seconds after it that it takes to find out, to say so and to end"""
_OF_ALL = ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "LIGHTNING_ORT_MEASURE")
"""variables that are set where Lightning starts the other processes"""


@dataclass
class Outcome:
    """What became of one fit.

    Attributes:
        ended: seconds from the kill to the end of the last process, ``None`` if one had to be ended.
        named: for each other process, whether its error names the killed one, or it has finished, as it may if that
            one was killed at the end.
        step: of the last checkpoint; ``None`` if there is none yet.
        finished: the killed one had already ended.
        outputs: of all processes.
    """

    ended: float | None
    named: list[bool]
    step: int | None
    finished: bool
    outputs: list[str]

    @property
    def right(self) -> bool:
        return self.finished or (self.ended is not None and all(self.named))


class Fit:
    """The processes of one fit, in ``folder``.

    Args:
        folder: empty.
        ranks: how many.
        launcher: ``"torchrun"``: all are started with the variables that torchrun sets; ``"script"``: one is started,
            and Lightning starts the others.
        command: a script and its arguments.
        forked: those that are started here are forks (:class:`.ranks.Forked`), which is faster.
    """

    def __init__(
        self, folder: Path, ranks: int, launcher: str, command: Sequence[str], *, forked: bool = False
    ) -> None:
        self.folder, self.ranks = folder, ranks
        started = torchrun_variables(ranks)
        if launcher == "script":
            started = [{name: started[0][name] for name in _OF_ALL}]
        self._files = [folder / f"{i}.out" for i in range(len(started))]
        start = Forked if forked else _started
        self._processes = [
            start(command, {**os.environ, **own}, file) for own, file in zip(started, self._files, strict=True)
        ]

    def wait_for(self, rank: int) -> int:
        """The process id of ``rank``, as soon as its own code begins."""
        path = self.folder / f"{rank}.pid"
        until = time.monotonic() + _IMPORTS
        while time.monotonic() < until:
            if path.exists() and (text := path.read_text()):
                return int(text)
            time.sleep(0.01)
        raise TimeoutError(f"rank {rank} has not begun: {self.outputs()}")

    def pids(self) -> list[int]:
        return [int(path.read_text()) for path in self.folder.glob("*.pid")]

    def ended(self, seconds: float) -> bool:
        """Whether all processes end within ``seconds``."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            codes = self.codes()  # which also lets go of those that have ended
            if None not in codes and not any(map(_runs, self.pids())):
                return True
            time.sleep(0.05)
        return False

    def close(self) -> None:
        """End what is left."""
        for pid in [*self.pids(), *(p.pid for p in self._processes if p.poll() is None)]:
            if _runs(pid):
                os.kill(pid, signal.SIGKILL)
        for p in self._processes:
            p.wait()

    def codes(self) -> list[int | None]:
        """How those that were started here have ended."""
        return [p.poll() for p in self._processes]

    def outputs(self) -> list[str]:
        return [file.read_text() for file in self._files]


def _started(command: Sequence[str], environment: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("w") as file:
        return subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _long_fit(folder: Path, ranks: int, launcher: str, timeout: float = _TIMEOUT, *, forked: bool = False) -> Fit:
    return Fit(folder, ranks, launcher, [str(SCRIPT), str(folder), str(timeout)], forked=forked)


def duration(ranks: int, launcher: str) -> float:
    """Seconds from the start of rank 1's own code to the end of a fit in which nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        fit = _long_fit(Path(folder), ranks, launcher)
        try:
            fit.wait_for(1)
            began = time.monotonic()
            if not fit.ended(_IMPORTS):
                raise TimeoutError(f"a fit does not end: {fit.outputs()}")
            return time.monotonic() - began
        finally:
            fit.close()


def kill(
    rank: int, after: float, ranks: int, launcher: str, folder: Path, timeout: float = _TIMEOUT, *, forked: bool = False
) -> Outcome:
    """One fit in which ``rank`` is killed ``after`` seconds of its own code; of all, where Lightning starts them.

    Its process group waits ``timeout`` seconds.
    """
    fit = _long_fit(folder, ranks, launcher, timeout, forked=forked)
    try:
        if launcher == "script":  # who has not been started yet, cannot say anything
            for other in range(ranks):
                fit.wait_for(other)
        victim = fit.wait_for(rank)
        time.sleep(after)
        finished = not _runs(victim)
        if not finished:
            os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        ended = time.monotonic() - began if fit.ended(timeout + _LONGER) else None
    finally:
        fit.close()
    outputs = fit.outputs()
    named = re.compile(rf"\brank {rank} of {ranks} has (ended|not come)|RankError: .*\brank {rank}\b")
    # where Lightning starts the others, all have one output
    whose = {r: outputs[0 if launcher == "script" else r] for r in range(ranks) if r != rank}
    said = [bool(named.search(text)) or f"rank {r} has finished" in text for r, text in whose.items()]
    last = folder / "last.ckpt"
    step = ORTCheckpointIO().load_checkpoint(last, map_location="cpu")["global_step"] if last.exists() else None
    return Outcome(ended, said, step, finished, outputs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill, print what has happened, and return how many fits did not end as they must."""
    parser = argparse.ArgumentParser(prog="python -m tests.distributed.kills", description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launcher", choices=["torchrun", "script"], default="torchrun")
    options = parser.parse_args(arguments)
    draw = random.Random(options.seed)
    whole = duration(options.ranks, options.launcher)
    print(f"a fit takes {whole:.1f} s", flush=True)
    wrong = 0
    for number in range(options.count):
        rank, after = draw.randrange(options.ranks), draw.uniform(0, whole)
        with tempfile.TemporaryDirectory() as folder:
            found = kill(rank, after, options.ranks, options.launcher, Path(folder))
        end = "does not end" if found.ended is None else f"all end after {found.ended:.1f} s"
        state = "had ended before" if found.finished else f"named {found.named}"
        print(f"{number}: rank {rank} at {after:.2f} s: {end}, {state}, last checkpoint {found.step}", flush=True)
        if not found.right:
            wrong += 1
            print("\n".join(f"--- output {i}\n{text[-3000:]}" for i, text in enumerate(found.outputs)), flush=True)
    print(f"{wrong} of {options.count} went wrong")
    return wrong


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
