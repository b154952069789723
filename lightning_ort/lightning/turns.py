"""Whether a step function is faster in graphs or as it is, measured on real calls of it.

A graph of a few layers may save less than what surrounds it takes: Dynamo's guards, a node of autograd, the binding of
memory. No run of a graph by itself shows that. Calls of the step do, and each of them is right either way, so that
they are made in turns for a while, and then as the faster ones were. A call lasts until the next one begins: what
follows it, its update for one, may take longer for its sake, as where threads that it has not used have gone to sleep.
Where nearly each call is compiled anew, as for lists of boxes of which any may be a single one, nothing is measured.

Where several processes train together, all make a call in the same way: what they wait for one another in may have
another order in graphs. Who has which call follows from its number, and what is decided from what all have found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from time import perf_counter
from typing import Any

import torch

from lightning_ort.compiler.choice import Choice, usual
from lightning_ort.compiler.contest import MEMORY, Key, wait_for
from lightning_ort.lightning.open_sizes import tensors_of
from lightning_ort.report import StepReport, timeline
from lightning_ort.runtime.config import RuntimeConfig

__all__ = ["Turns", "alone"]

_IN_GRAPHS, _AS_IT_IS = "graphs", "eager"

_CALM = 16
"""calls in a row in which nothing is compiled, after which nothing is expected to be"""
_WAYS = _IN_GRAPHS, _AS_IT_IS
_ORDER = _IN_GRAPHS, _AS_IT_IS, _AS_IT_IS, _IN_GRAPHS
_ROW, _COLD = 8, 3
"""calls that one has in a row, and those of them that do not count: what the other one uses is in the caches then"""
_ENOUGH = 6
"""calls of data of one size that each has to have had"""
_CLEAR, _SURE, _CYCLES = 0.1, 2, 5
"""the share of its time by which the slower way is clearly slower, and how often all rows are made at least then, and
where neither way is"""
_LASTING, _MOST = 0.25, 12
"""seconds that the rows take together before they decide, so that something else that has a core meanwhile, which
graphs on several threads wait for and others need not, does not; and how often they are made at most for that"""
_LONG = 0.02
"""seconds of a call to which what surrounds each of its graphs adds little"""
_LATEST, _TOO_MANY = 6, 5
"""of so many latest calls, how many were compiled anew where that is not expected to end"""
_PATIENCE = 400
"""calls after which graphs stay, because calls that are alike are too rare"""
_LOOK, _LOOK_TOGETHER = 8, 256
"""calls of a step as it is after which its sizes are looked at again; those of several processes wait to do so"""


def alone(facts: Sequence[float]) -> Sequence[float]:
    """The mean of ``facts`` over all processes, where there is one."""
    return facts


class Turns:
    """The calls of one step function: who has the next one, and how long those before have taken.

    Args:
        step: its account, which is told the outcome.
        parts: gives what makes the step what it is, besides its graphs.
        config: of the sessions.
        phases: how many times :meth:`note` is called for a call that counts.
        device: what the calls compute on, and what is waited for before a call.
        means: gives the means of numbers over all processes, each of which calls it with its own.

    Attributes:
        step: the account.
        decided: whether calls are made in one way from now on.
        calls: how many there were, which whoever makes them counts.
    """

    def __init__(
        self,
        step: StepReport,
        parts: Callable[[], Sequence[Any]],
        config: RuntimeConfig,
        phases: int,
        device: torch.device,
        means: Callable[[Sequence[float]], Sequence[float]] = alone,
    ) -> None:
        self.step, self._parts, self._config, self._phases, self._means = step, parts, config, phases, means
        self._device = device
        self._look = _LOOK if means is alone else _LOOK_TOGETHER
        self._begin()

    def _begin(self) -> None:
        self.decided, self.step.as_it_is, self.step.turns = False, False, {}
        self._seen: tuple[int, int, Hashable] | None = None  # compilations, graphs and state of the call before
        self._state: Hashable = None
        self._elements = 0  # that it is decided for
        self.step.recompiled_calls = self.calls = self._calm = self._in_rows = 0
        self._compiled: deque[bool] = deque(maxlen=_LATEST)  # whether anything was, in the latest calls
        self._are_rows = False
        self._times: dict[int, dict[str, list[float]]] = {}  # seconds of calls that count, by elements and by who
        self._present = ""  # who has the present call
        self._size: int | None = None  # its elements, if it counts
        self._noted, self._began = 0, 0.0

    def note(self) -> None:
        """A part of the present call has ended."""
        self._noted += 1

    def next(self, args: Any, compilations: int, state: Hashable) -> bool:
        """Whether the call that begins is one of the step as it is.

        Args:
            args: of the call.
            compilations: how many there have been so far, of anything.
            state: of what is trained; with another one, a step that is called as it is is measured anew.
        """
        elements = sum(x.numel() for x in tensors_of(args))
        if self.decided:
            # sizes up to twice as large are alike, as MEMORY has it
            if not any(self._means([elements > 2 * self._elements or state != self._state])):
                return self.step.as_it_is
            self._begin()
        is_measured = bool(self._present)
        if is_measured:
            wait_for(self._device)
        self._end_call(compilations, state)
        if self.calls % _ROW == 0 or (self._means is alone and sum(self._compiled) >= _TOO_MANY):
            self._meet(elements)
        if self._are_rows:
            row, place = divmod(self._in_rows, _ROW)
            self._present = _ORDER[row % len(_ORDER)]
            self._size = elements if place >= _COLD else None
            self._in_rows += 1
            if not is_measured:
                wait_for(self._device)
            self._began = perf_counter()
        return self.step.as_it_is or self._present == _AS_IT_IS

    @property
    def rest(self) -> bool:
        """Whether the call that begins is one of the step as it is, and :meth:`next` need not be asked."""
        return self.step.as_it_is and self.decided and self.calls % self._look != 0

    def _end_call(self, compilations: int, state: Hashable) -> None:
        """Enter the call before, which is complete."""
        seconds = perf_counter() - self._began
        present, self._present = self._present, ""
        noted, self._noted = self._noted, 0
        seen = compilations, self.step.graphs, state
        if self._seen is not None:
            self._compiled.append(seen[:2] != self._seen[:2])
        if seen != self._seen:
            self._seen, self._state, self._calm = seen, state, 0
            return
        self._calm += 1
        if present and self._size is not None and noted == self._phases and timeline.present is None:
            self._times.setdefault(self._size, {_IN_GRAPHS: [], _AS_IT_IS: []})[present].append(seconds)

    def _meet(self, elements: int) -> None:
        """What follows from the calls so far, of all processes."""
        if self._are_rows:
            self._look_at_rows()
            return
        self._elements, is_calm, recompiled = elements, self._calm >= _CALM, sum(self._compiled)
        known = MEMORY.get(self._key()) if is_calm else None
        all_calm, any_too_many, *all_know = self._means(
            [is_calm, recompiled >= _TOO_MANY, *[known is not None and known.executor == who for who in _WAYS]]
        )
        if any_too_many > 0:
            self.step.recompiled_calls = max(recompiled, _TOO_MANY)  # in one of the processes
            self._decide(Choice(_AS_IT_IS, {}))
        elif all_calm == 1 and 1 in all_know:
            assert known is not None
            self._decide(known)
        elif all_calm == 1:
            self._are_rows, self._in_rows, self._times = True, 0, {}

    def _look_at_rows(self) -> None:
        nothing: dict[str, list[float]] = {who: [] for who in _WAYS}
        self._elements, times = max(self._times.items(), key=_fewest, default=(0, nothing))
        graphs = times[_IN_GRAPHS]
        is_long = self._in_rows == _ROW and bool(graphs) and min(graphs) > _LONG * (1 + len(self.step.graph_breaks))
        has_enough = self._in_rows % (_ROW * len(_ORDER)) == 0 and _fewest((self._elements, times)) >= _ENOUGH
        seconds = [usual(times[who]) if has_enough else 0.0 for who in _WAYS]
        all_calm, all_long, all_enough, *seconds = self._means(
            [self._calm >= self._in_rows, is_long, has_enough, *seconds]
        )
        if all_calm < 1:
            self._are_rows = False
        elif all_long == 1 or self._in_rows > _PATIENCE:
            self._decide(Choice(_IN_GRAPHS, {}))
        elif all_enough == 1:
            is_clear = min(seconds) < (1 - _CLEAR) * max(seconds)
            lasting = self._in_rows * sum(seconds) / len(seconds)
            cycles = self._in_rows // (_ROW * len(_ORDER))
            if cycles >= (_SURE if is_clear else _CYCLES) and (lasting >= _LASTING or cycles >= _MOST):
                choice = Choice.among(dict(zip(_WAYS, seconds, strict=True)), _IN_GRAPHS, margin=0.0)
                MEMORY.put(self._key(), choice)
                self._decide(choice)

    def _decide(self, choice: Choice) -> None:
        self.decided, self._are_rows, self._times = True, False, {}
        self.step.turns = choice.milliseconds
        self.step.as_it_is = choice.executor == _AS_IT_IS
        if self.step.as_it_is:
            timeline.close()
            self.step.timing.calls.clear()  # those were in graphs

    def _key(self) -> Key:
        graphs = [(g.executor, g.begins, g.ends, g.calls, g.elements, sorted(g.inputs)) for g in self.step.each_graph]
        return Key.of_step(self.step.name, [*self._parts(), graphs], self._elements, self._config, self._device)


def _fewest(times: tuple[int, dict[str, list[float]]]) -> int:
    """Of calls with data of one size, how many the one has had that has had the fewest."""
    return min(map(len, times[1].values()))
