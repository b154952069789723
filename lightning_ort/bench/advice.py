"""Which strategy pays, and from which step on: a compiler costs time first and saves some of it in each step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_ort.bench.contestants import BASELINE, STRATEGIES

__all__ = ["advice", "break_even", "stretches"]

_MARGIN = 0.03
"""share of a step's time that counts as a difference; less is the noise of a quiet machine"""


def break_even(result: Mapping[str, Any], baseline: Mapping[str, Any]) -> int | None:
    """Steps after which ``result`` has made up for its compiling against ``baseline``; ``None`` for never.

    Args:
        result: with ``step_ms`` and ``compile_s``.
        baseline: likewise.
    """
    saved = baseline["step_ms"] - result["step_ms"]
    if saved <= 0:
        return None
    # a whole number of steps is one, whatever floating point makes of it
    return math.ceil(round(1e3 * max(0.0, result["compile_s"] - baseline["compile_s"]) / saved, 6))


def stretches(results: Sequence[Mapping[str, Any]]) -> list[tuple[int, Mapping[str, Any]]]:
    """First step and the result of the strategy that has taken the least time in all from there on.

    The first one is the baseline, from step 0; a strategy whose steps are not clearly faster than those of the one
    before does not follow it.
    """
    (present,) = (r for r in results if r["strategy"] == BASELINE)
    found, start = [(0, present)], 0
    while True:
        faster = [r for r in results if r["step_ms"] < (1 - _MARGIN) * present["step_ms"]]
        if not faster:
            return found
        # `present` is slower than all of them, so none of the crossings is "never"
        start, _, present = min(
            ((max(start, break_even(r, present) or 0), r["step_ms"], r) for r in faster), key=lambda entry: entry[:2]
        )
        if found[-1][0] == start:
            found.pop()
        found.append((start, present))


def advice(results: Sequence[Mapping[str, Any]]) -> str:
    """A sentence or two that say which strategy to use.

    Args:
        results: of :func:`~.measure.measure`; those with an ``"error"`` are left out.
    """
    measured = [r for r in results if "error" not in r]
    (baseline,) = (r for r in measured if r["strategy"] == BASELINE)
    found = stretches(measured)
    start, best = found[-1]
    times = ", ".join(f"{r['strategy']} {shown_step(r)}" for r in measured)
    if best is baseline:
        return f"Use {STRATEGIES[BASELINE]}: no other one is faster by more than {_MARGIN:.0%} ({times} a step)."
    speed = f"{baseline['step_ms'] / best['step_ms']:.2f}x as fast as those of {BASELINE} ({times})"
    if start == 0:
        return f"Use {STRATEGIES[best['strategy']]}: its steps are {speed}, from the first one on."
    before = [
        f"{STRATEGIES[r['strategy']]} from step {first:,} on" if first else STRATEGIES[r["strategy"]]
        for first, r in found[:-1]
    ]
    return (
        f"Use {STRATEGIES[best['strategy']]} for more than {start:,} steps: they are {speed}, which by then has made "
        f"up for {best['compile_s']:.1f} s of compiling. For less: {', '.join(before)}."
    )


def shown_step(result: Mapping[str, Any]) -> str:
    """The time of a step with three digits."""
    milliseconds = result["step_ms"]
    return f"{milliseconds:.3g} ms" if milliseconds < 100 else f"{milliseconds:.0f} ms"
