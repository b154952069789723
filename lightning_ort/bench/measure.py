"""Strategies in turns on one training, and what follows from the times of their steps."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lightning_ort.bench.contestants import BASELINE
from lightning_ort.bench.process import ChildFailed, Fit

__all__ = ["Settings", "measure"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How long is measured.

    Attributes:
        rounds: turns of every strategy that count.
        seconds: least duration of a turn.
        steps: least number of steps in a turn.
        warmup_steps: steps of the first turn, which does not count.
        threads: torch's number of threads, which ONNX Runtime takes over; ``None`` leaves it to torch.
    """

    rounds: int = 8
    seconds: float = 0.5
    steps: int = 4
    warmup_steps: int = 12
    threads: int | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: nothing could be measured so.
        """
        # the first step of a turn does not count
        for name, least in {"rounds": 1, "seconds": 0, "steps": 2, "warmup_steps": 1, "threads": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value}: expected {least} or more.")

    @classmethod
    def quick(cls, threads: int | None = None) -> Settings:
        """Enough to see that everything works; the times mean nothing."""
        return cls(rounds=2, seconds=0.05, steps=2, warmup_steps=3, threads=threads)


def measure(model: str, command: Sequence[str], strategies: Sequence[str], settings: Settings) -> list[dict[str, Any]]:
    """Train with each of the strategies, in turns; returns one result per strategy.

    Each strategy has a process of its own, so that neither threads nor memory of one touch the other, and only one
    of them runs at any time. Where one fails, its result has ``"error"`` and the others go on.

    Args:
        model: name of what is trained, for the results.
        command: starts a training, as :class:`~.process.Fit` wants it.
        strategies: names of :data:`~.contestants.STRATEGIES`.
        settings: how long.
    """
    failures: dict[str, str] = {}
    warmup: dict[str, list[float]] = {}
    turns: dict[str, list[float]] = {s: [] for s in strategies}
    ends: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        fits: dict[str, Fit] = {}
        for strategy in strategies:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            fits[strategy] = stack.enter_context(Fit(command, strategy, settings.threads, Path(scratch)))
            with _failure(strategy, failures):
                warmup[strategy] = fits[strategy].turn(0, settings.warmup_steps)
        for _ in range(settings.rounds):
            for strategy in [s for s in strategies if s not in failures]:
                with _failure(strategy, failures):
                    turns[strategy].append(_step_seconds(fits[strategy].turn(settings.seconds, settings.steps)))
        for strategy in [s for s in strategies if s not in failures]:
            with _failure(strategy, failures):
                ends[strategy] = fits[strategy].end()
    return [
        {"model": model, "strategy": s, "error": failures[s]}
        if s in failures
        else {"model": model, "strategy": s} | _summary(warmup[s], turns[s], turns.get(BASELINE), ends[s])
        for s in strategies
    ]


@contextlib.contextmanager
def _failure(strategy: str, failures: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except ChildFailed as error:
        failures[strategy] = str(error)


def _step_seconds(times: list[float]) -> float:
    # the first step of a turn finds the caches full of another strategy's data
    return median(times[1:])


def _summary(
    warmup: list[float], turns: list[float], baseline: list[float] | None, end: dict[str, Any]
) -> dict[str, Any]:
    result = {
        "step_ms": 1e3 * median(turns),
        "turns_ms": [1e3 * t for t in turns],
        "first_step_s": warmup[0],
        # compilation may happen in several of the first steps; the median among them is a step without it
        "compile_s": max(0.0, sum(warmup) - len(warmup) * median(warmup)),
        "peak_mb": end["peak_bytes"] / 1e6,
        "above_start_mb": max(0, end["peak_bytes"] - end["started_bytes"]) / 1e6,
        "threads": end["threads"],
        "compiler": end["compiler"],
        "speed": None,
    }
    if baseline and len(baseline) == len(turns):
        # turn by turn, because neighbours in time had the same machine
        speeds = [b / t for b, t in zip(baseline, turns, strict=True)]
        result["speed"] = {"median": median(speeds), "least": min(speeds), "most": max(speeds)}
        # likewise: on a busy machine, the medians of each strategy's own turns may say the opposite
        result["step_ms"] = 1e3 * median(baseline) / median(speeds)
    return result
