"""Learning rate schedules with a linear warm-up.

The step that counts is the number of updates made so far, so that the first training step of a schedule with warm-up
has learning rate 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_ort.optim.config import _OptimizerConfig
from lightning_ort.optim.step_info import TrainStepInfo
from lightning_ort.validation import is_whole, number, require, shown

__all__ = [
    "ConstantWarmupLRScheduler",
    "CosineWarmupLRScheduler",
    "LinearWarmupLRScheduler",
    "PolyWarmupLRScheduler",
    "ScheduledLR",
]


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


class _LRScheduler:
    """Base class; a schedule of your own overrides :meth:`get_lr`."""

    def __init__(self) -> None:
        self._last_lr: list[float] = []

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """The learning rate of the step about to be made, in a list.

        Args:
            train_step_info: ``optimization_step`` is the number of updates so far, ``optimizer_config.lr`` the base.
        """
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The learning rate of the last step, in a list.

        Raises:
            AssertionError: no step was made.
        """
        require(len(self._last_lr) > 0, "Learning rate must be computed by a training step before it can be read")
        return self._last_lr

    def torch_scheduler(self, optimizer: Optimizer, last_epoch: int = -1) -> LRScheduler:
        """The same as a torch scheduler, a :class:`~lightning_ort.optim.lr_scheduler.ScheduledLR`, for
        ``configure_optimizers``.
        """
        return ScheduledLR(optimizer, self, last_epoch)

    def _step(self, train_step_info: TrainStepInfo) -> list[float]:
        rates = self.get_lr(train_step_info)
        if not isinstance(rates, Sequence) or isinstance(rates, str) or len(rates) != 1:
            raise TypeError(f"get_lr() of {type(self).__name__} gave {shown(rates)}; expected a list of one number.")
        # in place of an update that would make all weights NaN
        number(f"learning rate of {type(self).__name__}", rates[0], low=0)
        self._last_lr = rates
        return rates


class _WarmupLRScheduler(_LRScheduler):
    def __init__(self, total_steps: int, warmup: float) -> None:
        super().__init__()
        require(
            is_whole(total_steps) and 0 < total_steps < 2**53,
            f"total_steps must be a strict positive number, an int; got {shown(total_steps)}",
        )
        require(
            isinstance(warmup, float) and 0 <= warmup < 1,
            f"warmup must be a float between [0, 1); got {shown(warmup)}",
        )
        self.total_steps, self.warmup = total_steps, warmup
        self._warmup_steps = warmup * total_steps  # not rounded

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        step, base = train_step_info.optimization_step, train_step_info.optimizer_config.lr
        if step < self._warmup_steps:
            return [base * (step / max(1, self._warmup_steps))]
        return [self._after_warmup(step, base)]

    def _after_warmup(self, step: int, base: float) -> float:
        raise NotImplementedError

    def _progress(self, step: int) -> float:
        return (step - self._warmup_steps) / max(1, self.total_steps - self._warmup_steps)


class ConstantWarmupLRScheduler(_WarmupLRScheduler):
    """The base learning rate after the warm-up.

    Args:
        total_steps: updates of the whole training.
        warmup: share of them in which the learning rate rises from 0 to the base.

    Raises:
        AssertionError: ``total_steps`` is no positive integer, or ``warmup`` no float in [0, 1).
    """

    def __init__(self, total_steps: int, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)

    def _after_warmup(self, step: int, base: float) -> float:
        return base


class CosineWarmupLRScheduler(_WarmupLRScheduler):
    """Falls along a cosine after the warm-up.

    Args:
        total_steps: updates of the whole training.
        cycles: number of waves; half a wave ends at 0.
        warmup: share of the updates in which the learning rate rises from 0 to the base.

    Raises:
        AssertionError: an argument is not as described.
    """

    def __init__(self, total_steps: int, cycles: float = 0.5, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        require(_is_finite(cycles) and 0 < cycles < 1e100, f"cycles must be a positive float; got {shown(cycles)}")
        self.cycles = cycles

    def _after_warmup(self, step: int, base: float) -> float:
        wave = math.cos(math.pi * self.cycles * 2.0 * self._progress(step))
        return base * max(0.0, 0.5 * (1.0 + wave))


class LinearWarmupLRScheduler(_WarmupLRScheduler):
    """Falls to 0 on a line after the warm-up.

    Args:
        total_steps: updates of the whole training.
        warmup: share of them in which the learning rate rises from 0 to the base.

    Raises:
        AssertionError: an argument is not as described.
    """

    def __init__(self, total_steps: int, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)

    def _after_warmup(self, step: int, base: float) -> float:
        return base * max(0.0, (self.total_steps - step) / max(1, self.total_steps - self._warmup_steps))


class PolyWarmupLRScheduler(_WarmupLRScheduler):
    """Falls to ``lr_end`` along a power of the remaining steps after the warm-up.

    Args:
        total_steps: updates of the whole training.
        lr_end: learning rate at the end; must be less than the base.
        power: 1 is a line.
        warmup: share of the updates in which the learning rate rises from 0 to the base.

    Raises:
        AssertionError: an argument is not as described.
    """

    def __init__(self, total_steps: int, lr_end: float = 1e-7, power: float = 1.0, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        require(_is_finite(lr_end) and lr_end >= 0, f"lr_end must be a positive float; got {shown(lr_end)}")
        require(_is_finite(power) and power >= 0, f"power must be a positive float; got {shown(power)}")
        self.lr_end, self.power = lr_end, power

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """The learning rate of the step about to be made; see the base class."""
        base = train_step_info.optimizer_config.lr
        require(base > self.lr_end, f"lr_end ({self.lr_end}) must be smaller than the base learning rate ({base})")
        return super().get_lr(train_step_info)

    def _after_warmup(self, step: int, base: float) -> float:
        if step > self.total_steps:
            return self.lr_end
        remaining = 1 - (step - self._warmup_steps) / (self.total_steps - self._warmup_steps)
        decayed = (base - self.lr_end) * remaining**self.power + self.lr_end
        # as a share of the base and back: the digits of the original
        return base * (decayed / base)


class ScheduledLR(LRScheduler):
    """Sets the learning rate of each group to what ``schedule`` makes of the group's own.

    To be stepped after each update: ``{"scheduler": ..., "interval": "step"}`` in ``configure_optimizers``.

    Args:
        optimizer: whose learning rates are set.
        schedule: one of ``lightning_ort.optim.lr_scheduler``.
        last_epoch: number of updates made so far, less one; -1 starts.

    Raises:
        AssertionError: the schedule refuses a learning rate of ``optimizer`` as its base.
    """

    def __init__(self, optimizer: Optimizer, schedule: _LRScheduler, last_epoch: int = -1) -> None:
        self.schedule = schedule
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """Learning rate per group, after ``last_epoch`` updates."""
        rates = []
        for base in self.base_lrs:
            config = _OptimizerConfig("SGDOptimizer", [], {"lr": float(base)})
            # the scheduler is stepped once per update: the two counters of the trainer are one here
            rates += self.schedule.get_lr(
                TrainStepInfo(config, optimization_step=self.last_epoch, step=self.last_epoch)
            )
        return rates

    def state_dict(self) -> dict[str, Any]:
        """All but the optimizer and the schedule, which hold no progress."""
        return {key: value for key, value in super().state_dict().items() if key != "schedule"}
