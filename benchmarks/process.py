"""The parent's handle on a child that holds a running fit."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

__all__ = ["ChildFailed", "Fit", "build_inductor_headers"]

_ROOT = Path(__file__).parents[1]
_LINES_OF_ERROR = 12


class ChildFailed(RuntimeError):
    """A child ended before it answered; the text is the end of what it printed."""


class Fit:
    """``Trainer.fit`` in a process of its own, which runs only during :meth:`turn` and :meth:`end`.

    Args:
        model: name of the model.
        strategy: ``"auto"``, ``"compile"`` or ``"ort"``.
        threads: torch's number of threads, which ONNX Runtime takes over; ``None`` leaves it to torch.
        precision: of the Trainer.
        scratch: an empty folder for what is compiled, so that nothing comes from the cache of an earlier run.
    """

    def __init__(self, model: str, strategy: str, threads: int | None, precision: str, scratch: Path) -> None:
        settings = {"model": model, "strategy": strategy, "threads": threads, "precision": precision}
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(scratch), "LIGHTNING_ORT_CACHE_DIR": str(scratch)}
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by __exit__)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.child", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=_ROOT,
            env={**os.environ, **caches, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
        )

    def turn(self, seconds: float, steps: int) -> list[float]:
        """Train for at least so many seconds and steps; returns the seconds of each step.

        Raises:
            ChildFailed: training failed.
        """
        assert self._process.stdin is not None
        # a child that is no more shows in its reply
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"seconds": seconds, "steps": steps}), file=self._process.stdin, flush=True)
        return self._reply()["times"]

    def end(self) -> dict[str, Any]:
        """End the training; returns the child's peak memory (bytes), threads and compiler statistics.

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
            raise ChildFailed(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = [line for line in self._errors.read().splitlines() if line.strip()]
        return "\n".join([f"exit status {code}", *lines[-_LINES_OF_ERROR:]])

    def __enter__(self) -> Fit:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.__exit__(None, None, None)
        self._process.wait()
        self._errors.close()


def build_inductor_headers() -> None:
    """Compile a trivial function, because inductor precompiles its C++ headers once per machine, whatever the cache."""
    code = "import torch; torch.compile(lambda x: x.sin() + 1)(torch.ones(64))"
    # without a C++ compiler this fails, and so will each child, which says why
    subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.DEVNULL)
