"""The gradient divided by the root of the sum of all its squares."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_ort.updates.rule import Rule

__all__ = ["Adagrad"]


@dataclasses.dataclass(frozen=True)
class Adagrad(Rule):
    """As ``torch.optim.Adagrad``."""

    coefficients = ("step", "epsilon")

    @property
    def states(self) -> tuple[str, ...]:
        return ("sum",)

    @staticmethod
    def numbers(
        lr: float, lr_decay: float, epsilon: float, count: float, *, maximize: bool = False
    ) -> tuple[float, ...]:
        """Coefficients of update number ``count``, which starts at 1."""
        step = lr / (1 + (count - 1) * lr_decay)
        return -step if maximize else step, epsilon

    def formula(
        self, param: Tensor, grad: Tensor, scale: Tensor, states: Sequence[Tensor], c: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        gradient = scale * grad
        total = states[0] + gradient * gradient
        return param - c["step"] * (gradient / (total.sqrt() + c["epsilon"])), total
