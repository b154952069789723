"""What an ORTTrainer tells schedules and loss scalers about its progress."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_ort.optim.config import _OptimizerConfig
from lightning_ort.validation import require

__all__ = ["TrainStepInfo"]


class TrainStepInfo:
    """Progress of a training.

    Args:
        optimizer_config: of the trainer; ``optimizer_config.lr`` is the base learning rate.
        all_finite: whether the gradients of the last update were finite (mixed precision only).
        fetches: names of the outputs that steps return; all of them if empty.
        optimization_step: number of updates.
        step: number of training steps; with gradient accumulation there are several per update.

    Raises:
        AssertionError: an argument is not as described.
    """

    def __init__(
        self,
        optimizer_config: _OptimizerConfig,
        all_finite: bool = True,
        fetches: Sequence[str] | None = None,
        optimization_step: int = 0,
        step: int = 0,
    ) -> None:
        fetches = [] if fetches is None else fetches
        require(isinstance(optimizer_config, _OptimizerConfig), "'optimizer_config' must be an optimizer config")
        require(isinstance(all_finite, bool), "'all_finite' must be a bool")
        strings = isinstance(fetches, list) and all(isinstance(name, str) for name in fetches)
        require(strings, "'fetches' must be a list of str")
        for name, number in {"optimization_step": optimization_step, "step": step}.items():
            require(isinstance(number, int) and number >= 0, f"'{name}' must be a non-negative int")
        self.optimizer_config, self.all_finite, self.fetches = optimizer_config, all_finite, fetches
        self.optimization_step, self.step = optimization_step, step

    def __repr__(self) -> str:
        return (
            f"TrainStepInfo(optimization_step={self.optimization_step}, step={self.step}, "
            f"all_finite={self.all_finite}, fetches={self.fetches})"
        )
