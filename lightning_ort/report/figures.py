"""What a step costs, against torch: worked out of timed calls and of what was measured when executors were chosen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from lightning_ort.report.timeline import TimedCall, Where

if TYPE_CHECKING:
    from lightning_ort.report.account import StepReport

__all__ = ["Figures", "figures_of"]

_DISTURBED = 3.0
"""how often as long as the median a call takes in which something else had the machine"""


@dataclasses.dataclass(frozen=True)
class Figures:
    """What timed calls of a step function show, see :meth:`StepReport.figures() <lightning_ort.StepReport.figures>`.

    Attributes:
        timed: how many calls these are means of.
        seconds: of a call with its backward and its update.
        shares: of those seconds, by who had them (``"onnxruntime"``, ``"torch"``, ``"python"``); they add up to 1.
        seconds_in_torch: of the same in torch alone; ``None`` where that is not known.
        pays_from: number of the call from which on compiling is paid back by faster calls; ``math.inf`` where calls are
            not faster, ``None`` where it is not known.
        call: a timed one that took about that long.
    """

    timed: int
    seconds: float
    shares: Mapping[Where, float]
    seconds_in_torch: float | None
    pays_from: float | None
    call: TimedCall

    @property
    def speed(self) -> float | None:
        """How often as fast as in torch alone; ``None`` where that is not known."""
        return None if self.seconds_in_torch is None else self.seconds_in_torch / self.seconds


def figures_of(step: StepReport) -> Figures | None:
    """See :meth:`StepReport.figures`."""
    calls = list(step.timing.calls)
    if not calls:
        return None
    middle = median(c.seconds for c in calls)
    usual = [c for c in calls if c.seconds <= _DISTURBED * middle]
    seconds = _mean([c.seconds for c in usual])
    totals = [c.shares for c in usual]
    shares: dict[Where, float] = {where: _mean([t[where] for t in totals]) / seconds for where in totals[0]}
    saved = [_in_turns(step)] if step.turns else [_saved(c) for c in usual]
    known = [s for s in saved if s is not None]
    in_torch = pays_from = None
    if len(known) == len(saved):
        in_torch = seconds + _mean(known)
        pays_from = _pays_from(step.compile_seconds, _mean(known))
    # the longest of those that had the most phases: an update does not follow each call
    phases = max(len(c.phases) for c in usual)
    call = min((c for c in usual if len(c.phases) == phases), key=lambda c: abs(c.seconds - middle))
    return Figures(len(usual), seconds, shares, in_torch, pays_from, call)


def _in_turns(step: StepReport) -> float:
    """Seconds that a call was measured to take longer as it is, if it is not called so."""
    return 0.0 if step.as_it_is else 1e-3 * (step.turns["eager"] - step.turns["graphs"])


def _saved(call: TimedCall) -> float | None:
    """Seconds that the graphs of ``call`` would have taken longer in torch; ``None`` where one was not measured."""
    now = measured = 0.0
    for run in call.graphs:
        if run.graph is None or run.graph.speed is None or run.graph.gain is None:
            return None
        now += (run.graph.speed - 1) * run.seconds
        measured += run.graph.gain
    return min(now, measured)


def _pays_from(compile_seconds: float, saved: float) -> float:
    return math.ceil(compile_seconds / saved) if saved > 0 else math.inf


def _mean(values: Sequence[Any]) -> float:
    return sum(values) / len(values)
