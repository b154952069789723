"""The parent's handle on a child that holds a running fit."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from lightning_ort.bench.child import JOB

__all__ = ["ChildFailed", "Fit", "build_inductor_headers", "empty_caches", "last_words"]

_LINES_OF_ERROR = 12


class ChildFailed(RuntimeError):
    """A child ended before it answered; the text is the end of what it printed."""


class Fit:
    """``Trainer.fit`` in a process of its own, which runs only during :meth:`turn` and :meth:`end`.

    Args:
        command: starts the process, which is to make a :class:`~.child.Child` and to train with its ``turns``.
        strategy: which the child is asked for.
        threads: torch's number of threads, which ONNX Runtime takes over; ``None`` leaves it to torch.
        scratch: an empty folder for what is compiled, so that nothing comes from the cache of an earlier run.
    """

    def __init__(self, command: Sequence[str], strategy: str, threads: int | None, scratch: Path) -> None:
        job = {JOB: json.dumps({"strategy": strategy, "threads": threads})}
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by __exit__)
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **empty_caches(scratch), **job, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
        )

    def turn(self, seconds: float, steps: int) -> list[float]:
        """Train for at least so many seconds and steps; returns the seconds of each step.

        Raises:
            ChildFailed: training failed, or ended by itself.
        """
        assert self._process.stdin is not None
        # a child that is no more shows in its reply
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"seconds": seconds, "steps": steps}), file=self._process.stdin, flush=True)
        reply = self._reply()
        if "times" not in reply:
            raise ChildFailed(
                "The training ended before it was measured. Does the training set have batches, and does nothing in "
                "the module end the fit?"
            )
        return reply["times"]

    def end(self) -> dict[str, Any]:
        """End the training; returns the child's memory (bytes), threads and compiler statistics.

        Raises:
            ChildFailed: training failed.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            raise ChildFailed(last_words(code, self._errors.read()))
        return json.loads(line)

    def __enter__(self) -> Fit:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.__exit__(None, None, None)
        self._process.wait()
        self._errors.close()


def empty_caches(folder: Path) -> dict[str, str]:
    """Environment in which all that compilers keep for later runs goes to ``folder``."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder), "LIGHTNING_ORT_CACHE_DIR": str(folder)}


def last_words(code: int, errors: str) -> str:
    """What is told of a process that failed: its exit status and the end of what it printed."""
    lines = [line for line in errors.splitlines() if line.strip()]
    return "\n".join([f"exit status {code}", *lines[-_LINES_OF_ERROR:]])


def build_inductor_headers() -> None:
    """Compile a trivial function, because inductor precompiles its C++ headers once per machine, whatever the cache."""
    code = "import torch; torch.compile(lambda x: x.sin() + 1)(torch.ones(64))"
    # without a C++ compiler this fails, and so will each child, which says why
    subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.DEVNULL)
