"""How many threads torch's own update of an optimizer takes: one, where that is measured to be faster."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch.optim import Optimizer

from lightning_ort.compiler.choice import MARGIN, usual

__all__ = ["UpdateThreads", "may_take_fewer"]

_FIRST = 2
"""updates that are not measured: states are made in them, and threads started"""
_MEASURED = 8
"""updates that are, with each number of threads"""


@functools.cache
def _can_change() -> bool:
    """Whether the number of torch's threads may be changed once they have worked: where they are OpenMP's."""
    return "ATen parallel backend: OpenMP" in torch.__config__.parallel_info()


def may_take_fewer(optimizer: Optimizer) -> bool:
    """Whether torch makes the updates of ``optimizer`` by fused kernels on the CPU.

    Those wait for all threads at each tensor, however small: some microseconds, and as many milliseconds where other
    programs have the cores. They compute each element by itself, so that the number of threads changes no bit.
    """
    groups = optimizer.param_groups
    on_cpu = all(p.device.type == "cpu" for group in groups for p in group["params"])
    return on_cpu and bool(groups) and all(group.get("fused") for group in groups)


class UpdateThreads:
    """Measures updates with one thread and with all in turns, and keeps to what was faster.

    An update is what comes between :meth:`begin` and :meth:`end`, or a block. A step is what comes between the
    beginnings of two: threads that an update leaves idle have gone to sleep, and what comes after it waits for them. So
    one thread has to save a share of the steps, and the updates have to account for it, since steps differ by
    themselves.

    Args:
        clock: seconds that have passed.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._steps: dict[bool, list[float]] = {True: [], False: []}
        self._updates = 0
        self._one: bool | None = None
        self._has_one = False
        # of the update that runs: threads to go back to, and whether it has but one
        self._before: int | None = None
        self._on_one = False
        self._began, self._around = 0.0, 0.0

    @property
    def milliseconds(self) -> dict[bool, float] | None:
        """The usual time of an update with one thread, and with all; ``None`` before that is known."""
        if self._one is None:
            return None
        return {one: 1e3 * usual(times) for one, times in self._times.items()}

    @property
    def stay(self) -> bool:
        """Whether nothing is to be done from now on: all threads turned out to be faster, or there is only one."""
        return self._one is False or self._has_one

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *exc: object) -> None:
        self.end()

    def begin(self, around: float = 0.0) -> None:
        """The update begins, all that comes before it is done.

        Args:
            around: seconds that this has taken so far, which are spent for one thread's sake alone.
        """
        self.end()  # the last one may have raised
        if self._one is False:
            return
        threads = torch.get_num_threads()
        self._has_one = threads == 1 or not _can_change()
        if self._has_one:
            return
        began = self._clock()
        if self._one is None and self._updates > _FIRST:
            self._steps[self._on_one].append(began - self._began - (0.0 if self._on_one else self._around))
        self._on_one = self._one if self._one is not None else self._updates % 2 == 0
        self._before, self._began, self._around = threads, began, around
        if self._on_one:
            torch.set_num_threads(1)

    def end(self, around: float = 0.0) -> bool:
        """The update is made, or will not be: torch has the threads again that it had before.

        Args:
            around: seconds since then, as of :meth:`begin`.

        Returns:
            Whether one thread has just turned out to be faster.
        """
        if self._before is None:
            return False
        seconds = self._clock() - self._began + self._around
        threads, self._before = self._before, None
        self._around += around
        if self._on_one:
            torch.set_num_threads(threads)
        if self._one is not None:
            return False
        self._updates += 1
        if self._updates > _FIRST:
            self._times[self._on_one].append(seconds if self._on_one else seconds - self._around)
        if min(map(len, self._times.values())) == _MEASURED:
            self._one = self._is_faster()
        return self._one is True

    def _is_faster(self) -> bool:
        """Whether an update on one thread is, and with it the step."""
        least = MARGIN * usual(self._steps[False])
        return all(usual(found[True]) < usual(found[False]) - least for found in (self._times, self._steps))
