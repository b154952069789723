"""Factors on the loss that keep float16 gradients from vanishing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lightning_ort.validation import is_whole, number, shown

if TYPE_CHECKING:
    from lightning_ort.optim.step_info import TrainStepInfo

__all__ = ["DynamicLossScaler", "LossScaler"]


_LARGEST = 3.4028234663852886e38
"""float32, which the factor is in a graph"""


def _scale(name: str, value: Any, *, infinite: bool = False) -> float:
    try:
        found = number(name, value, above=0, infinite=infinite)
    except (TypeError, ValueError):
        found = math.nan
    if not (0 < found <= _LARGEST or (infinite and found > 0)):
        finite = "" if infinite else ", and finite in float32"
        raise AssertionError(f"'{name}' must be a positive float{finite}; got {shown(value)}")
    return found


class LossScaler:
    """Base class; a scaler of your own overrides :meth:`update`.

    Args:
        loss_scale: the factor, to begin with.

    Raises:
        AssertionError: ``loss_scale`` is no positive float.
    """

    def __init__(self, loss_scale: float) -> None:
        self._input_name: str | None = None
        self.loss_scale = loss_scale
        self._initial_loss_scale = self.loss_scale

    @property
    def input_name(self) -> str | None:
        """Name of the input of the training graph that takes the scale."""
        return self._input_name

    @input_name.setter
    def input_name(self, input_name: str) -> None:
        if not (isinstance(input_name, str) and input_name):
            raise AssertionError("'input_name' must be a string")
        self._input_name = input_name

    @property
    def loss_scale(self) -> float:
        """The present factor."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, loss_scale: float) -> None:
        if not isinstance(loss_scale, float):
            raise AssertionError(f"'loss_scale' must be a positive float; got {shown(loss_scale)}")
        self._loss_scale = _scale("loss_scale", loss_scale)

    def reset(self) -> None:
        """Back to the first scale."""
        self.loss_scale = self._initial_loss_scale

    def update(self, train_step_info: TrainStepInfo) -> float | None:
        """Set and return the scale of the next step.

        Args:
            train_step_info: ``all_finite`` tells whether the gradients of the last step were; if not, it was skipped.
        """
        raise NotImplementedError


class DynamicLossScaler(LossScaler):
    """Doubles the scale after a while without infinite gradients, and halves it at each of them.

    Args:
        automatic_update: ``False`` leaves the scale to you.
        loss_scale: the factor, to begin with; a float or an int, as the next two.
        up_scale_window: number of finite steps after which it is doubled.
        min_loss_scale: not halved below.
        max_loss_scale: not doubled above; may be infinite.

    Raises:
        AssertionError: an argument is not as described.
    """

    def __init__(
        self,
        automatic_update: bool = True,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ) -> None:
        super().__init__(_scale("loss_scale", loss_scale))
        if not isinstance(automatic_update, bool):
            raise AssertionError(f"'automatic_update' must be a boolean; got {shown(automatic_update)}")
        if not (is_whole(up_scale_window) and up_scale_window > 0):
            raise AssertionError(f"'up_scale_window' must be a positive integer; got {shown(up_scale_window)}")
        self.automatic_update, self.up_scale_window = automatic_update, up_scale_window
        self.min_loss_scale = _scale("min_loss_scale", min_loss_scale)
        self.max_loss_scale = _scale("max_loss_scale", max_loss_scale, infinite=True)
        self._stable_steps_count = 0

    def reset(self) -> None:
        """Back to the first scale, with no finite steps counted."""
        super().reset()
        self._stable_steps_count = 0

    def update(self, train_step_info: TrainStepInfo) -> float:
        """Set and return the scale of the next step; see the base class."""
        if not self.automatic_update:
            return self.loss_scale
        if train_step_info.all_finite:
            self._stable_steps_count += 1
            if self._stable_steps_count >= self.up_scale_window:
                doubled = min(self.max_loss_scale, self.loss_scale * 2)
                if doubled <= _LARGEST:
                    self.loss_scale = doubled
                self._stable_steps_count = 0
        else:
            self.loss_scale = max(self.min_loss_scale, self.loss_scale / 2)
            self._stable_steps_count = 0
        return self.loss_scale

    def state_dict(self) -> dict[str, Any]:
        """The scale and the number of finite steps since it changed."""
        return {"loss_scale": self.loss_scale, "stable_steps": self._stable_steps_count}
