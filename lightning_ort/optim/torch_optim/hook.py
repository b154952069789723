"""Where ONNX Runtime's update takes the place of torch's: inside of ``optimizer.step()``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from lightning_ort.distributed.sharding import local_part
from lightning_ort.errors import UnsupportedError
from lightning_ort.lightning_packages import PACKAGES, rank_zero_info
from lightning_ort.optim.kinds import unwrapped
from lightning_ort.optim.optimizers import Lamb
from lightning_ort.optim.threads import UpdateThreads, may_take_fewer
from lightning_ort.optim.torch_optim.members import InTorch
from lightning_ort.optim.torch_optim.stepper import OptimizerStepper, why_not
from lightning_ort.report import InTorch as Entry
from lightning_ort.report import OptimizerReport, Report
from lightning_ort.runtime.config import RuntimeConfig

__all__ = ["HookedOptimizers", "Mode", "StepHook", "why_torch_is_faster"]

Mode = Literal["auto", "torch", "ort"]


class StepHook:
    """Makes the updates of ``optimizer`` whenever its ``step`` is called, by whomever.

    A step pre-hook hands ``step`` a closure that calls the user's, makes the update, and leaves nothing for torch to
    update. So hooks, schedulers that count the calls of ``step``, and whatever else is wrapped around it, stay.

    Args:
        optimizer: any torch optimizer.
        mode: ``"ort"``, or ``"auto"`` where ONNX Runtime is faster.
        config: how sessions are made.
        verify: compare the first update of each graph with torch's.
        refuse: raise where torch would have to make an update, in mode ``"ort"``.
        report: where to enter what happens.
        announce: called with a text the first time that torch makes an update, in mode ``"ort"``.

    Raises:
        UnsupportedError: with ``refuse``, an optimizer that ONNX Runtime can make no updates of.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: Mode,
        config: RuntimeConfig,
        *,
        verify: bool,
        refuse: bool,
        report: OptimizerReport,
        announce: Callable[[str], None],
    ) -> None:
        self.optimizer, self.report = optimizer, report
        self._mode, self._announce = mode, announce
        self._refuse = refuse and mode == "ort"
        self._stepper: OptimizerStepper | None = None
        # number of groups when the choice was made, and why it fell on torch
        self._choice: tuple[int, str | None] = (-1, None)
        reason = why_not(optimizer)
        if reason is None:
            self._stepper = OptimizerStepper(optimizer, config, verify=verify)
        else:
            self._note(reason)
        previous = _PRESENT.get(optimizer, lambda: None)()
        if previous is not None:  # of another strategy: two would make two updates
            previous.remove()
        self._threads, self._fewer = UpdateThreads(), (-1, False)
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        _PRESENT[optimizer] = weakref.ref(self)

    def remove(self) -> None:
        """Leave the updates to torch from now on."""
        self._threads.end()
        for handle in self._handles:
            handle.remove()

    # the update and what it calls are no part of a step's graph
    @torch.compiler.disable
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        in_torch = self._stepper is None or not self._chosen()
        if in_torch:
            self.report.in_torch += 1
            if not self._may_take_fewer():
                return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")

        def closure_and_update() -> Any:
            result = None if closure is None else closure()
            if in_torch:
                self._threads.begin()
            elif self._update():
                optimizer.param_groups = _Updated(optimizer)
            return result

        rest = {key: value for key, value in kwargs.items() if key != "closure"}
        return (args[0], closure_and_update, *args[2:]), rest

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._threads.end() and (times := self._threads.milliseconds) is not None:
            one, many = (f"{times[key]:.2g} ms" for key in (True, False))
            reason = f"its kernel was faster on one thread, and stays there ({one}; on all {many})"
            self.report.reasons.append(Entry(self.report.name, reason, ""))

    def _may_take_fewer(self) -> bool:
        groups = len(self.optimizer.param_groups)
        if self._fewer[0] != groups:
            self._fewer = groups, may_take_fewer(self.optimizer)
        return self._fewer[1]

    def _chosen(self) -> bool:
        if self._mode == "ort":
            return True
        groups = len(self.optimizer.param_groups)
        if self._choice[0] != groups:
            self._choice = groups, why_torch_is_faster(self.optimizer)
            if self._choice[1] is not None:
                self._note(f"optimizer='auto' found torch to be faster: {self._choice[1]}")
        return self._choice[1] is None

    def _update(self) -> bool:
        assert self._stepper is not None
        try:
            self._stepper.step()
        except InTorch as reason:
            self._note(str(reason))
            self.report.in_torch += 1
            return False
        finally:
            self.report.graphs, self.report.compile_seconds = self._stepper.graphs, self._stepper.compile_seconds
        self.report.in_ort += 1
        return True

    def _note(self, reason: str) -> None:
        name = self.report.name
        if self._refuse:
            raise UnsupportedError(
                f"{name} cannot be updated in ONNX Runtime, as optimizer='ort' with on_unsupported='error' demands: "
                f"{reason}. Use optimizer='auto', or on_unsupported='torch'."
            )
        entry = Entry(name, reason, "")
        if entry not in self.report.reasons:
            self.report.reasons.append(entry)
            if self._mode == "ort":
                self._announce(f"{name} is updated by torch: {reason}")


_PRESENT: weakref.WeakKeyDictionary[Optimizer, weakref.ref[StepHook]] = weakref.WeakKeyDictionary()
"""optimizer to the hook that it has, and keeps"""


class _Updated(list):
    """Stands for the groups of an optimizer whose update has been made: none, for the loop that follows the closure."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self._optimizer, self._groups = optimizer, optimizer.param_groups

    def __iter__(self) -> Iterator[Any]:
        self._optimizer.param_groups = self._groups
        return iter(())


class HookedOptimizers:
    """Keeps a hook in the step of each optimizer in use.

    Args:
        mode: see :class:`StepHook`; with ``"torch"`` there are none.
        config: how sessions are made.
        verify: compare the first update of each graph with torch's.
        refuse: raise where torch would have to make an update.
        report: where to enter what happens.
    """

    def __init__(self, mode: Mode, config: RuntimeConfig, *, verify: bool, refuse: bool, report: Report) -> None:
        self.mode, self._config, self._verify, self._refuse = mode, config, verify, refuse
        self._report = report
        self._hooks: list[StepHook] = []

    def __getstate__(self) -> dict[str, Any]:
        # copies of optimizers have no hooks
        return {**vars(self), "_hooks": []}

    def attach(self, optimizers: Iterable[Any]) -> None:
        """Hook those that are not hooked yet, and let go of those that are no longer used.

        Raises:
            UnsupportedError: with ``refuse``, an optimizer that ONNX Runtime can make no updates of.
        """
        wanted = {id(o): o for o in map(self._torch_optimizer, optimizers) if o is not None}
        for hook in self._hooks:
            if id(hook.optimizer) not in wanted:
                hook.remove()
        self._hooks = [hook for hook in self._hooks if id(hook.optimizer) in wanted]
        hooked = {id(hook.optimizer) for hook in self._hooks}
        self._hooks += [self._hook(o) for key, o in wanted.items() if key not in hooked]

    def attach_for_good(self, optimizer: Any) -> None:
        """Hook ``optimizer``, which keeps its hook for as long as it lives, or until another strategy has it.

        Raises:
            UnsupportedError: with ``refuse``, ONNX Runtime can make no updates of it.
        """
        wanted = self._torch_optimizer(optimizer)
        if wanted is not None:
            self._hook(wanted)

    def _torch_optimizer(self, optimizer: Any) -> Optimizer | None:
        """The one to hook, which users may have wrapped; what stands in for none at all is Lightning's own."""
        found = local_part(unwrapped(optimizer))
        if self.mode == "torch" or not isinstance(found, Optimizer) or any(p.has(type(found)) for p in PACKAGES):
            return None
        return found

    def _hook(self, optimizer: Optimizer) -> StepHook:
        report = OptimizerReport(type(optimizer).__name__)
        hook = StepHook(
            optimizer,
            self.mode,
            self._config,
            verify=self._verify,
            refuse=self._refuse,
            report=report,
            announce=rank_zero_info,
        )
        self._report.optimizers.append(report)
        return hook

    def remove(self) -> None:
        """Leave all updates to torch from now on."""
        self.attach(())


FEWEST = 6
"""Tensors from which one graph for all of them is faster than a handful of torch calls for each."""

LARGEST = 2048
"""Elements of an average tensor up to which it is; beyond, the passes over memory decide, where torch needs fewer."""


def why_torch_is_faster(optimizer: Optimizer) -> str | None:
    """Why torch's own update of ``optimizer`` is at least as fast; ``None`` if ONNX Runtime's is faster.

    It depends on class, settings and sizes alone, so that the same program always gets the same answer.
    """
    groups = optimizer.param_groups
    params = [p for group in groups for p in group["params"] if p.requires_grad]
    if any(p.device.type != "cpu" for p in params):
        return "nothing has been measured on a device other than the CPU"
    for flag in ("fused", "foreach"):
        if any(group.get(flag) for group in groups):
            return f"{flag}=True is at least as fast"
    if type(optimizer) is torch.optim.SGD:
        return "SGD is too little work to hand over"
    elements = sum(p.numel() for p in params) / max(len(params), 1)
    largest = 2 * LARGEST if type(optimizer) is Lamb else LARGEST
    if len(params) < FEWEST or elements > largest:
        return (
            f"it has {len(params)} tensors of {elements:.0f} elements on average; ONNX Runtime is faster from {FEWEST} "
            f"tensors on, of {largest} elements at most"
        )
    return None
