"""Where ONNX Runtime's update takes the place of torch's: inside of ``optimizer.step()``."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_ort.distributed.sharding import STEP_HOOKS, local_part
from lightning_ort.errors import UnsupportedError
from lightning_ort.lightning_packages import PACKAGES, rank_zero_info
from lightning_ort.optim.kinds import unwrapped
from lightning_ort.optim.threads import UpdateThreads, may_take_fewer
from lightning_ort.optim.torch_optim.choice import (
    AS_WRITTEN,
    FUSED,
    ONNXRUNTIME,
    choose,
)
from lightning_ort.optim.torch_optim.fused import FusedUpdate, GroupsOfOneStep, fused_groups, fused_kernel_fits
from lightning_ort.optim.torch_optim.members import NeedsTorch
from lightning_ort.optim.torch_optim.stepper import OptimizerStepper, why_not
from lightning_ort.report import InTorch, OptimizerReport, Report
from lightning_ort.runtime.config import RuntimeConfig

__all__ = ["HookedOptimizers", "Mode", "StepHook"]

Mode = Literal["auto", "torch", "ort"]


class StepHook:
    """Makes the updates of ``optimizer`` whenever its ``step`` is called, by whomever.

    A step pre-hook hands ``step`` a closure that calls the user's, makes the update, and leaves nothing for torch to
    update, or has torch make it by another kernel. So hooks, schedulers that count the calls of ``step``, and whatever
    else is wrapped around it, stay.

    Args:
        optimizer: any torch optimizer.
        mode: ``"ort"``, or ``"auto"`` for what is measured to be fastest.
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
        self._mode, self._announce, self._config = mode, announce, config
        self._refuse = refuse and mode == "ort"
        self._stepper: OptimizerStepper | None = None
        # number of groups when the choice was made, and the choice
        self._chosen_for = -1
        self._executor = ONNXRUNTIME if mode == "ort" else AS_WRITTEN
        reason = why_not(optimizer)
        if reason is None:
            self._stepper = OptimizerStepper(optimizer, config, verify=verify)
        else:
            self._executor = AS_WRITTEN
            self._note(reason)
        previous = _PRESENT.get(optimizer, lambda: None)()
        if previous is not None:  # of another strategy: two would make two updates
            previous.remove()
        self._threads, self._fewer = UpdateThreads(), (-1, False)
        self._fused = FusedUpdate(optimizer)
        self._idle_for = -1
        self._handles: list[RemovableHandle] = []
        # one that wraps another without ``Optimizer.__init__`` has no place for them, or a dictionary of its own in
        # which torch keeps none; of its class nothing is known
        places = [getattr(optimizer, name, None) for name in STEP_HOOKS]
        if all(isinstance(place, OrderedDict) for place in places):
            self._handles = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]
        _PRESENT[optimizer] = weakref.ref(self)

    def remove(self) -> None:
        """Leave the updates to torch from now on."""
        self.break_off()
        for handle in self._handles:
            handle.remove()

    def break_off(self) -> None:
        """There is no update to come of a step that has begun, if any has."""
        self._threads.end()
        self._give_groups_back()

    @property
    def idle(self) -> bool:
        """Whether torch makes the updates of these groups as they are written, and nothing is left to find out."""
        return self._idle_for == len(self.optimizer.param_groups)

    def __enter__(self) -> None:
        """A step comes. One that raises calls no post-hook, so that the end of the block gives back what it has."""
        self.come_last()

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None:
            self.break_off()

    def come_last(self) -> None:
        """See to it that no other pre-hook comes after this one: it would find the update made."""
        if self._handles and not self._is_last():
            self._handles[0].remove()
            self._handles[0] = self.optimizer.register_step_pre_hook(self._before_step)

    def _is_last(self) -> bool:
        hooks = self._handles[0].hooks_dict_ref()
        return hooks is None or next(reversed(hooks), None) == self._handles[0].id

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return self._prepare_apart(optimizer, args, kwargs)
        if self.idle:
            self.report.in_torch += 1
            return None
        return self._prepare(optimizer, args, kwargs, perf_counter())

    # the update and what it calls are no part of a step's graph
    @torch.compiler.disable
    def _prepare_apart(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._prepare(optimizer, args, kwargs, None)

    def _prepare(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], began: float | None) -> Any:
        self._give_groups_back()  # of a step that has ended before its loop
        if self._mode == "auto" and self._stepper is not None:
            self._choose()
        executor = self._executor
        if executor != AS_WRITTEN and not self._is_last():
            self._note(
                "a pre-hook of its step was registered after that of this strategy, which comes last from now on"
            )
            executor = AS_WRITTEN
        if executor != ONNXRUNTIME:
            self.report.in_torch += 1
            if executor == AS_WRITTEN and not self._may_take_fewer():
                return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        done, spent = False, 0.0

        def closure_and_update() -> Any:
            nonlocal done
            result = None if closure is None else closure()
            closed = perf_counter()
            if done:  # by a post-hook, say, which is given this
                return result
            done = True
            if executor == ONNXRUNTIME:
                if self._update():
                    optimizer.param_groups = GroupsOfOneStep(optimizer, ())
                return result
            update = self._fused.ready() if executor == FUSED else None
            fits = update is not None or (executor == FUSED and fused_kernel_fits(optimizer))
            if fits or executor == AS_WRITTEN:
                self._threads.begin(spent + perf_counter() - closed)
            if update is not None:
                update()
                optimizer.param_groups = GroupsOfOneStep(optimizer, ())
            elif fits:
                optimizer.param_groups = GroupsOfOneStep(optimizer, fused_groups(optimizer.param_groups))
            return result

        rest = {key: value for key, value in kwargs.items() if key != "closure"}
        spent = 0.0 if began is None else perf_counter() - began
        return (args[0], closure_and_update, *args[2:]), rest

    def _give_groups_back(self) -> None:
        groups = self.optimizer.param_groups
        if isinstance(groups, GroupsOfOneStep):
            groups.give_back()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.idle:
            return
        ended = perf_counter()
        self._give_groups_back()
        self.come_last()
        if self._executor == AS_WRITTEN and (self._threads.stay or not self._may_take_fewer()):
            self._idle_for = len(optimizer.param_groups)
        if self._threads.end(perf_counter() - ended) and (times := self._threads.milliseconds) is not None:
            one, many = (f"{times[key]:.2g} ms" for key in (True, False))
            reason = f"its kernel was faster on one thread, and stays there ({one}; on all {many})"
            self.report.reasons.append(InTorch(self.report.name, reason, ""))

    def _may_take_fewer(self) -> bool:
        groups = len(self.optimizer.param_groups)
        if self._fewer[0] != groups:
            self._fewer = groups, may_take_fewer(self.optimizer)
        return self._fewer[1]

    def _choose(self) -> None:
        """Choose who makes the updates, again where groups have come in since."""
        groups = len(self.optimizer.param_groups)
        if self._chosen_for == groups:
            return
        self._chosen_for = groups
        choice, reason = choose(self.optimizer, self._config)
        self._executor = choice.executor
        if reason is not None:
            self._note(f"optimizer='auto': {reason}")

    def _update(self) -> bool:
        assert self._stepper is not None
        try:
            self._stepper.step()
        except NeedsTorch as reason:
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
        entry = InTorch(name, reason, "")
        if entry not in self.report.reasons:
            self.report.reasons.append(entry)
            if self._mode == "ort":
                self._announce(f"{name} is updated by torch: {reason}")


_PRESENT: weakref.WeakKeyDictionary[Optimizer, weakref.ref[StepHook]] = weakref.WeakKeyDictionary()
"""optimizer to the hook that it has, and keeps"""


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

    @property
    def idle(self) -> bool:
        """Whether nothing of a step of any of them is this package's any more."""
        return bool(self._hooks) and all(hook.idle for hook in self._hooks)

    def stepping(self, optimizer: Any) -> contextlib.AbstractContextManager[None]:
        """A step of ``optimizer`` comes, in the block."""
        hook = None if self.idle else self._hook_of(optimizer)
        return contextlib.nullcontext() if hook is None else hook

    @staticmethod
    def _hook_of(optimizer: Any) -> StepHook | None:
        found = local_part(unwrapped(optimizer))
        return _PRESENT.get(found, lambda: None)() if isinstance(found, Optimizer) else None

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
