"""All optimizers of a Trainer, each with its hook."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_ort.optimizer_steps.step_hook import Mode, StepHook
from lightning_ort.report import OptimizerReport, Report
from lightning_ort.runtime.config import RuntimeConfig

__all__ = ["HookedOptimizers"]


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
        self._mode, self._config, self._verify, self._refuse = mode, config, verify, refuse
        self._report = report
        self._hooks: list[StepHook] = []

    def attach(self, optimizers: Iterable[Any]) -> None:
        """Hook those that are not hooked yet, and let go of those that are no longer used.

        Raises:
            UnsupportedError: with ``refuse``, an optimizer that ONNX Runtime can make no updates of.
        """
        # wrapped by users or not; what stands in for no optimizer at all is Lightning's own
        unwrapped = [o.optimizer if isinstance(o, LightningOptimizer) else o for o in optimizers]
        wanted = {
            id(o): o
            for o in unwrapped
            if isinstance(o, Optimizer) and not type(o).__module__.startswith("lightning.") and self._mode != "torch"
        }
        for hook in self._hooks:
            if id(hook.optimizer) not in wanted:
                hook.remove()
        self._hooks = [hook for hook in self._hooks if id(hook.optimizer) in wanted]
        hooked = {id(hook.optimizer) for hook in self._hooks}
        for optimizer in [o for key, o in wanted.items() if key not in hooked]:
            report = OptimizerReport(type(optimizer).__name__)
            self._hooks.append(
                StepHook(
                    optimizer,
                    self._mode,
                    self._config,
                    verify=self._verify,
                    refuse=self._refuse,
                    report=report,
                    announce=rank_zero_info,
                )
            )
            self._report.optimizers.append(report)

    def remove(self) -> None:
        """Leave all updates to torch from now on."""
        self.attach(())
