"""Where a training stands, in Lightning's counters: loops and schedulers."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import LRSchedulerConfig

    from lightning_ort.lightning_packages import pl

__all__ = ["Position", "advance_schedulers", "loops_at"]


@dataclasses.dataclass(frozen=True)
class Position:
    """A place between two steps.

    Attributes:
        batches: trained so far, over all epochs.
        updates: optimizer steps so far, those that loss scaling left out as well.
        per_epoch: batches of one epoch, ``None`` if that is not known.
    """

    batches: int
    updates: int
    per_epoch: int | None

    @property
    def epoch(self) -> int:
        """Epochs that have ended."""
        return self.batches // self.per_epoch if self.per_epoch else 0

    @property
    def batch(self) -> int:
        """Batches of the epoch that has not ended."""
        return self.batches % self.per_epoch if self.per_epoch else self.batches


def loops_at(fit_loop: Mapping[str, Any], position: Position, *, accumulate: int, manual: bool) -> dict[str, Any]:
    """State of the fit loop at a position, as Lightning's own checkpoints have it.

    They are written after an epoch's end or, within an epoch, when a batch has been processed.

    Args:
        fit_loop: the loop's ``state_dict()`` at any other position, for all that does not depend on it.
        position: where.
        accumulate: batches of one update.
        manual: whether the LightningModule steps its optimizers itself.
    """
    found = copy.deepcopy(dict(fit_loop))
    epochs, batches = position.epoch, position.batches
    ended = position.batch == 0
    current = (position.per_epoch or 0) if ended and epochs else position.batch
    begun = epochs if ended else epochs + 1
    found["epoch_progress"] = _both(_counts(begun, begun, epochs, epochs), _counts(begun, begun, epochs, epochs))
    unfinished = 0 if ended else 1
    found["epoch_loop.batch_progress"] = {
        **_both(
            _counts(batches, batches, batches, batches - unfinished),
            _counts(current, current, current, current - unfinished),
        ),
        "is_last_batch": ended and epochs > 0,
    }
    here = -(-current // accumulate) if ended else current // accumulate
    here = min(here, position.updates)
    if manual:
        found["epoch_loop.manual_optimization.optim_step_progress"] = _both(_steps(position.updates), _steps(here))
    else:
        found["epoch_loop.automatic_optimization.optim_progress"] = {
            "optimizer": {
                "step": _both(_steps(position.updates), _steps(here)),
                "zero_grad": _both(
                    _steps(position.updates) | {"started": position.updates}, _steps(here) | {"started": here}
                ),
            }
        }
    # Lightning counts the batch that has just stepped only when it goes on
    stepping = not ended and current % accumulate == 0
    found["epoch_loop.state_dict"] = {"_batches_that_stepped": position.updates - stepping}
    return found


def _counts(ready: int, started: int, processed: int, completed: int) -> dict[str, int]:
    return {"ready": ready, "completed": completed, "started": started, "processed": processed}


def _steps(count: int) -> dict[str, int]:
    return {"ready": count, "completed": count}


def _both(total: dict[str, int], current: dict[str, int]) -> dict[str, Any]:
    return {"total": total, "current": current}


def advance_schedulers(trainer: pl.Trainer, start: Position, end: Position) -> None:
    """Step the trainer's schedulers as often as Lightning does between two positions.

    A learning rate may depend on all those before, so that it is computed anew. A ``ReduceLROnPlateau`` follows a
    metric that is not known, and stays; under manual optimization the LightningModule steps schedulers, and they stay.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau:
            continue
        with warnings.catch_warnings():
            # torch has not seen the optimizer's steps, and some schedulers step others in a way it has deprecated
            warnings.simplefilter("ignore")
            for _ in range(_times(config, start, end, trainer.accumulate_grad_batches)):
                module.lr_scheduler_step(config.scheduler, None)


def _times(config: LRSchedulerConfig, start: Position, end: Position, accumulate: int) -> int:
    if config.interval == "epoch":
        return end.epoch // config.frequency - start.epoch // config.frequency
    if config.frequency == 1:
        return end.updates - start.updates
    # Lightning looks at the number of the batch in its epoch
    size, count = end.per_epoch, 0
    for batch in range(start.batches, end.batches):
        number = batch % size + 1 if size else batch + 1
        count += number % config.frequency == 0 and (number % accumulate == 0 or number == size)
    return count
