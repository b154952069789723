"""Whether a step function is faster in graphs or as it is, measured on real calls of it.

A graph of a few layers may save less than what surrounds it takes: Dynamo's guards, a node of autograd, the binding of
memory. No run of a graph by itself shows that. Calls of the step do, and each of them is right either way, so that
they are made in turns for a while, and then as the faster ones were.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from time import perf_counter
from typing import Any

from lightning_ort.compiler.contest import MEMORY, Choice, Key
from lightning_ort.lightning.open_sizes import tensors_of
from lightning_ort.report import StepReport, timeline
from lightning_ort.runtime.config import RuntimeConfig

__all__ = ["AS_IT_IS", "IN_GRAPHS", "Turns"]

IN_GRAPHS, AS_IT_IS = "graphs", "eager"

_CALM = 16
"""calls in a row in which nothing is compiled, after which nothing is expected to be"""
_ORDER = (IN_GRAPHS, AS_IT_IS, AS_IT_IS, IN_GRAPHS)
_ROW, _COLD = 8, 3
"""calls that one has in a row, and those of them that do not count: what the other one uses is in the caches then"""
_LONG = 0.02
"""seconds of a call to which what surrounds its graphs adds little"""
_PATIENCE = 400
"""calls after which graphs stay, because calls that are alike are too rare"""


class Turns:
    """The calls of one step function: who has the next one, and how long those before have taken.

    Args:
        step: its account, which is told the outcome.
        parts: gives what makes the step what it is, besides its graphs.
        config: of the sessions.
        phases: how many times :meth:`note` adds up to a call: what lies between them is not counted.

    Attributes:
        step: the account.
        decided: whether calls are made in one way from now on.
    """

    def __init__(
        self, step: StepReport, parts: Callable[[], Sequence[Any]], config: RuntimeConfig, phases: int
    ) -> None:
        self.step, self._parts, self._config, self._phases = step, parts, config, phases
        self.decided = False
        self._seen: Hashable = None
        self._state: Hashable = None
        self._calm = self._waited = 0
        self._elements = 0
        self._times: dict[str, list[float]] = {}
        self._present = ""  # of a call that counts, who has it
        self._elapsed: list[float] = []

    def note(self, began: float) -> None:
        """A part of the present call, which ``began`` at that second of ``time.perf_counter``, has ended."""
        self._elapsed.append(perf_counter() - began)

    def next(self, args: Any, compilations: int, state: Hashable) -> bool:
        """Whether the call that begins is one of the step as it is.

        Args:
            args: of the call.
            compilations: how many there have been so far, of anything.
            state: of what is trained; with another one, a step that is called as it is is measured anew.
        """
        elements = sum(x.numel() for x in tensors_of(args))
        # sizes up to twice as large are alike, as MEMORY has it
        if self.step.as_it_is and (elements > 2 * self._elements or state != self._state):
            self.decided, self._calm = False, 0
            self.step.turns, self.step.as_it_is = {}, False
        if not self.decided:
            self._end_call(compilations)
        if not self.decided and self._calm >= _CALM:
            self._begin_call(elements, state)
        return self.step.as_it_is or self._present == AS_IT_IS

    def _begin_call(self, elements: int, state: Hashable) -> None:
        if not self._times or state != self._state:
            self._elements, self._state, self._waited = elements, state, 0
            self._times = {IN_GRAPHS: [], AS_IT_IS: []}
            known = MEMORY.get(self._key())
            if known is not None:
                self._decide(known)
                return
        self._waited += 1
        if self._waited > _PATIENCE:
            self._decide(Choice(IN_GRAPHS, {}))
        elif elements == self._elements:
            self._present = _ORDER[sum(map(len, self._times.values())) // _ROW]

    def _end_call(self, compilations: int) -> None:
        """Enter the call before, which is complete."""
        present, self._present = self._present, ""
        elapsed, self._elapsed = self._elapsed, []
        seen = compilations, self.step.graphs
        if seen != self._seen:
            self._seen, self._calm, self._times = seen, 0, {}
            return
        self._calm += 1
        if not present or len(elapsed) != self._phases or timeline.present is not None:
            return
        self._times[present].append(sum(elapsed))
        graphs, eager = self._times.values()
        if len(graphs) == _ROW and not eager and min(graphs) > _LONG:
            self._decide(Choice(IN_GRAPHS, {}))
        elif len(graphs) + len(eager) == _ROW * len(_ORDER):
            choice = Choice.among({who: _usual(row) for who, row in self._times.items()}, IN_GRAPHS)
            MEMORY.put(self._key(), choice)
            self._decide(choice)

    def _decide(self, choice: Choice) -> None:
        self.decided, self._times, self._present = True, {}, ""
        self.step.turns = choice.milliseconds
        self.step.as_it_is = choice.executor == AS_IT_IS
        if self.step.as_it_is:
            self.step.timing.calls.clear()  # those were in graphs

    def _key(self) -> Key:
        graphs = [(g.executor, g.begins, g.ends, g.calls, g.elements, sorted(g.inputs)) for g in self.step.each_graph]
        return Key.of_step(self.step.name, [*self._parts(), graphs], self._elements, self._config)


def _usual(row: Sequence[float]) -> float:
    """Seconds of a call that nothing has disturbed."""
    warm = sorted(seconds for i, seconds in enumerate(row) if i % _ROW >= _COLD)
    return warm[len(warm) // 4]  # what else the machine does only ever adds to a call
