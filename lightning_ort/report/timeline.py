"""When ONNX Runtime, torch and Python had their turns in a call of a step.

A few calls are timed, most are not. One that is not costs two comparisons, and a look at :data:`present` per run of a
graph: less than a tenth of a microsecond. One that is timed costs about ten microseconds, and one more per run of a
graph: the clock is read and a tuple is kept. What follows from them is worked out when somebody asks.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from lightning_ort.report.account import GraphReport

__all__ = ["Interval", "Recording", "TimedCall", "Timing", "Where", "backward_begins", "backward_ends", "begin",
           "close", "spoil", "update_ends"]  # fmt: skip

Where = Literal["onnxruntime", "torch", "python"]

_FIRST = 3
"""the first call that is timed: the second one may be compiled for what the first one's backward has shown"""
_KEPT = 32
"""timed calls that are kept, the latest"""


@dataclasses.dataclass(frozen=True)
class Interval:
    """One turn.

    Attributes:
        where: who had it.
        what: ``"graph"``, a part of one, ``"backward"``, ``"update"``, or ``""`` for what is not told apart.
        begin: seconds from the beginning of the call.
        end: likewise.
        graph: the graph that ran, if one did.
    """

    where: Where
    what: str
    begin: float
    end: float
    graph: GraphReport | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


_Entry = tuple[Where, str, float, float, "GraphReport | None"]


@dataclasses.dataclass(frozen=True)
class TimedCall:
    """One call of a step function, with the backward and the update that followed it.

    Attributes:
        began: when, on the clock of ``time.perf_counter``.
        seconds: from there to the end of the last phase.
    """

    began: float
    seconds: float
    _entries: Sequence[Any]
    _phases: Sequence[Any]

    @property
    def phases(self) -> list[Interval]:
        """The step function, its backward and its update, as far as they were seen."""
        return [self._interval(entry) for entry in self._phases]

    @property
    def graphs(self) -> list[Interval]:
        """The runs of graphs, each as a whole."""
        runs = [self._interval(entry) for entry in self._entries if entry[1] == "graph"]
        return [run for run in runs if run.end <= self.seconds]

    @property
    def intervals(self) -> list[Interval]:
        """The innermost turn of each moment, one after the other; Python has what is no turn."""
        found: list[Interval] = []
        stack = [Interval("python", "", 0.0, self.seconds)]

        def paint(owner: Interval, end: float) -> None:
            begin = found[-1].end if found else 0.0
            if end <= begin:
                return
            last = found[-1] if found else None
            if last is not None and (last.where, last.what, last.graph) == (owner.where, owner.what, owner.graph):
                found[-1] = dataclasses.replace(last, end=end)
            else:
                found.append(dataclasses.replace(owner, begin=begin, end=end))

        for entry in sorted(map(self._interval, self._entries), key=lambda e: (e.begin, -e.end)):
            while len(stack) > 1 and stack[-1].end <= entry.begin:
                ended = stack.pop()
                paint(ended, ended.end)
            outer = stack[-1]
            paint(outer, min(entry.begin, outer.end))
            stack.append(
                dataclasses.replace(entry, end=min(entry.end, outer.end), graph=entry.graph or outer.graph),
            )
        while stack:
            ended = stack.pop()
            paint(ended, ended.end)
        return found

    @property
    def shares(self) -> dict[Where, float]:
        """Seconds of each."""
        total: dict[Where, float] = {"onnxruntime": 0.0, "torch": 0.0, "python": 0.0}
        for interval in self.intervals:
            total[interval.where] += interval.seconds
        return total

    def _interval(self, entry: _Entry) -> Interval:
        where, what, begin, end, graph = entry
        return Interval(where, what, begin - self.began, end - self.began, graph)


@dataclasses.dataclass
class Timing:
    """The timed calls of one step function.

    Timed are the third call, the ones after it, and then fewer and fewer: the next one comes after an eighth of the
    calls that have been made, which is always an odd number of calls later, so that all of a cycle of two, four or
    eight (accumulated gradients) have their turn.

    Attributes:
        due: number of the call that is timed next, from 1.
        calls: those that were timed, the latest 32. One in which something was compiled, measured or compared with
            torch is not among them.
        not_timed: why no call is, in words; empty where calls are.
    """

    due: int = _FIRST
    calls: deque[TimedCall] = dataclasses.field(default_factory=lambda: deque(maxlen=_KEPT))
    not_timed: str = ""


class Recording:
    """What is noted of the present call, until the next one begins.

    Args:
        timing: where it goes.
        name: of the step function.
    """

    __slots__ = ("_began", "_entries", "_last", "_name", "_phases", "_spoiled", "_timing", "entered")

    def __init__(self, timing: Timing, name: str) -> None:
        self._timing, self._name = timing, name
        self._entries: list[_Entry] = []
        self._phases: list[_Entry] = []
        self._spoiled = False
        self._began = self._last = self.entered = perf_counter()

    def add(self, where: Where, what: str, began: float, graph: GraphReport | None = None) -> None:
        """Note a turn that has just ended."""
        self._entries.append((where, what, began, perf_counter(), graph))

    def leave(self, name: str) -> None:
        """The step function of that name has returned."""
        if name == self._name:
            self._end_phase("python", name, self._began)

    def backward_ends(self) -> None:
        """It began at :attr:`entered`. What no graph computes of it is torch's autograd."""
        self.add("torch", "backward", self.entered)
        self._end_phase("torch", "backward", self.entered)

    def update_ends(self, began: float) -> None:
        """The optimizer has made its step, in which it had the closure called first."""
        began = max(began, self._last)
        by_onnxruntime = any(what == "update" and begin >= began for _, what, begin, *_ in self._entries)
        if not by_onnxruntime:
            self.add("torch", "update", began)
        self._end_phase("torch", "update", began)

    def spoil(self) -> None:
        """Leave the call out: it does what others do not."""
        self._spoiled = True

    def close(self) -> None:
        """Keep it, if it has ended and is like others."""
        if self._phases and not self._spoiled:
            seconds = self._last - self._began
            self._timing.calls.append(TimedCall(self._began, seconds, tuple(self._entries), tuple(self._phases)))

    def _end_phase(self, where: Where, what: str, began: float) -> None:
        self._last = perf_counter()
        self._phases.append((where, what, began, self._last, None))


present: Recording | None = None
"""of the call that is timed at present"""


def begin(step: Any, device: str) -> None:
    """A call of a step function begins: what was noted of the one before is complete.

    Args:
        step: its :class:`~lightning_ort.report.StepReport`, in which the call is counted already.
        device: type of the device that computes.
    """
    global present
    close()
    timing = step.timing
    if device != "cpu":
        timing.due = sys.maxsize
        timing.not_timed = "a GPU computes while Python goes on, so that Python's clock does not tell what it does"
    elif step.calls >= timing.due:
        timing.due = step.calls + (step.calls // 8 | 1)
        present = Recording(timing, step.name)


def close() -> None:
    """End what is being noted, if anything is."""
    global present
    if present is not None:
        present.close()
        present = None


def spoil() -> None:
    """Something happens that is no part of other calls: compiling, measuring, comparing with torch."""
    if present is not None:
        present.spoil()


def backward_begins() -> None:
    """See :meth:`Recording.backward_ends`."""
    if present is not None:
        present.entered = perf_counter()


def backward_ends() -> None:
    """See :meth:`Recording.backward_ends`."""
    if present is not None:
        present.backward_ends()


def update_ends(began: float) -> None:
    """See :meth:`Recording.update_ends`."""
    if present is not None:
        present.update_ends(began)
