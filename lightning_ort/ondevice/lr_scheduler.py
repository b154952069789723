"""A learning rate that rises and falls linearly."""

from __future__ import annotations

from lightning_ort.ondevice.optimizer import Optimizer

__all__ = ["LinearLRScheduler"]


class LinearLRScheduler:
    """Raises the learning rate from 0 to ``initial_lr`` in ``warmup_step_count`` steps, then lowers it to 0.

    Update number ``k`` (from 0) is made with ``initial_lr * k / warmup_step_count`` in the warm-up, and after it with
    ``initial_lr * (total_step_count - k) / (total_step_count - warmup_step_count)``. (ONNX Runtime's own class takes
    each of the two counts for the other.) What has been done is read from the optimizer, so that a training that goes
    on from a checkpoint goes on with its schedule.

    Args:
        optimizer: whose learning rate is set, now and by :meth:`step`.
        warmup_step_count: number of steps of the warm-up.
        total_step_count: number of steps in all.
        initial_lr: learning rate at the end of the warm-up.

    Raises:
        ValueError: negative or inverted counts, or a rate that cannot be.
    """

    def __init__(self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float) -> None:
        if not 0 <= warmup_step_count <= total_step_count:
            raise ValueError(
                f"warmup_step_count={warmup_step_count!r}, total_step_count={total_step_count!r}: expected 0 <= "
                "warmup_step_count <= total_step_count."
            )
        self._optimizer, self._initial = optimizer, float(initial_lr)
        self._warmup, self._total = warmup_step_count, total_step_count
        self.step()

    def step(self) -> None:
        """Set the learning rate of the next update; to be called after each ``optimizer.step()``."""
        done = self._optimizer.step_count
        if done < self._warmup:
            factor = done / self._warmup
        else:
            factor = max(self._total - done, 0) / max(self._total - self._warmup, 1)
        self._optimizer.set_learning_rate(self._initial * factor)
