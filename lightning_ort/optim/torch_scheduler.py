"""A schedule of this package as a torch scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_ort.optim.config import _OptimizerConfig

if TYPE_CHECKING:
    from lightning_ort.optim.lr_scheduler import _LRScheduler

__all__ = ["ScheduledLR"]


class ScheduledLR(LRScheduler):
    """Sets the learning rate of each group to what ``schedule`` makes of the group's own.

    To be stepped after each update: ``{"scheduler": ..., "interval": "step"}`` in ``configure_optimizers``.

    Args:
        optimizer: whose learning rates are set.
        schedule: one of :mod:`lightning_ort.optim.lr_scheduler`.
        last_epoch: number of updates made so far, less one; -1 starts.

    Raises:
        AssertionError: the schedule refuses a learning rate of ``optimizer`` as its base.
    """

    def __init__(self, optimizer: Optimizer, schedule: _LRScheduler, last_epoch: int = -1) -> None:
        self.schedule = schedule
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """Learning rate per group, after ``last_epoch`` updates."""
        from lightning_ort.trainer.step_info import TrainStepInfo

        rates = []
        for base in self.base_lrs:
            config = _OptimizerConfig("Optimizer", [], {"lr": float(base)})
            # the scheduler is stepped once per update: the two counters of the trainer are one here
            rates += self.schedule.get_lr(
                TrainStepInfo(config, optimization_step=self.last_epoch, step=self.last_epoch)
            )
        return rates

    def state_dict(self) -> dict[str, Any]:
        """All but the optimizer and the schedule, which hold no progress."""
        return {key: value for key, value in super().state_dict().items() if key != "schedule"}
