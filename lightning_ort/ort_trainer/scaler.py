"""Loss scalers of the older interface."""

from __future__ import annotations

from typing import Any

from lightning_ort import amp
from lightning_ort.amp.rules import ScaledStep
from lightning_ort.validation import number, shown

__all__ = ["LossScaler", "as_scaler"]


class LossScaler(amp.DynamicLossScaler):
    """:class:`~lightning_ort.amp.DynamicLossScaler` under the names of the older interface.

    Args:
        loss_scale_input_name: of the input that takes the scale; any name, as ``ORTTrainer.loss_scale_input_name``.
        is_dynamic_scale: whether :meth:`update_loss_scale` moves the scale.
        loss_scale: the factor, to begin with.
        up_scale_window: number of finite steps after which it is doubled.
        min_loss_scale: not halved below.
        max_loss_scale: not doubled above.

    Raises:
        AssertionError: an argument is not as described.

    Attributes:
        loss_scale_input_name_: as given.
    """

    def __init__(
        self,
        loss_scale_input_name: str,
        is_dynamic_scale: bool,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ) -> None:
        super().__init__(is_dynamic_scale, loss_scale, up_scale_window, min_loss_scale, max_loss_scale)
        self.input_name = self.loss_scale_input_name_ = loss_scale_input_name

    def update_loss_scale(self, is_all_finite: Any) -> None:
        """Move the scale after a step whose gradients were all finite, or were not."""
        self.update(ScaledStep(bool(is_all_finite), 0, 0))  # type: ignore[arg-type]

    @property
    def loss_scale_(self) -> float:
        """The present factor."""
        return self.loss_scale

    @loss_scale_.setter
    def loss_scale_(self, value: float) -> None:
        self.loss_scale = float(value)

    @property
    def is_dynamic_scale_(self) -> bool:
        """Whether :meth:`update_loss_scale` moves the scale."""
        return self.automatic_update

    @property
    def initial_loss_scale_(self) -> float:
        """The factor to which :meth:`~lightning_ort.amp.DynamicLossScaler.reset` goes back."""
        return self._initial_loss_scale

    @property
    def up_scale_window_(self) -> int:
        """Number of finite steps after which the scale is doubled."""
        return self.up_scale_window

    @property
    def min_loss_scale_(self) -> float:
        """Not halved below."""
        return self.min_loss_scale

    @property
    def max_loss_scale_(self) -> float:
        """Not doubled above."""
        return self.max_loss_scale

    @property
    def stable_steps_(self) -> int:
        """Number of finite steps since the scale changed."""
        return self._stable_steps_count


class _Foreign(amp.LossScaler):
    """A scaler of a class of the user's own, with the names of the older interface or of ``amp.LossScaler``."""

    def __init__(self, scaler: Any) -> None:
        self._input_name, self._scaler = None, scaler
        self._attribute = "loss_scale_" if hasattr(scaler, "loss_scale_") else "loss_scale"

    @property
    def loss_scale(self) -> float:
        """The present factor."""
        return number(f"{self._attribute} of {type(self._scaler).__name__}", self._value(), above=0)

    @loss_scale.setter
    def loss_scale(self, loss_scale: float) -> None:
        setattr(self._scaler, self._attribute, loss_scale)

    def _value(self) -> Any:
        value = getattr(self._scaler, self._attribute)
        return value.item() if hasattr(value, "item") else value

    def reset(self) -> None:
        self._scaler.reset()

    def update(self, train_step_info: Any) -> None:
        if hasattr(self._scaler, "update_loss_scale"):
            self._scaler.update_loss_scale(train_step_info.all_finite)
        else:
            self._scaler.update(train_step_info)


def as_scaler(scaler: Any) -> amp.LossScaler | None:
    """``scaler`` as the trainer takes it; a foreign one stays the object that moves.

    Raises:
        TypeError: it has no scale, or nothing that moves it.
        ValueError: its scale is no positive number.
    """
    if scaler is None or isinstance(scaler, amp.LossScaler):
        return scaler
    has_scale = hasattr(scaler, "loss_scale_") or hasattr(scaler, "loss_scale")
    moves = getattr(scaler, "update_loss_scale", getattr(scaler, "update", None))
    if isinstance(scaler, type) or not has_scale or not callable(moves):
        raise TypeError(
            f"loss_scaler={shown(scaler)}: expected a LossScaler, or an object with loss_scale_ and "
            "update_loss_scale(is_all_finite)."
        )
    found = _Foreign(scaler)
    found.loss_scale  # noqa: B018  # a wrong one is told now
    return found
