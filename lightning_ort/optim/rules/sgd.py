"""Stochastic gradient descent, plain and with momentum."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_ort.optim.rules.rule import Rule

__all__ = ["SGD", "Momentum"]


@dataclasses.dataclass(frozen=True)
class SGD(Rule):
    """The gradient times the learning rate, taken from the weight."""

    coefficients = ("lr",)

    def formula(
        self, param: Tensor, grad: Tensor, scale: Tensor, states: Sequence[Tensor], c: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        return (param - (c["lr"] * scale) * grad,)


@dataclasses.dataclass(frozen=True)
class Momentum(Rule):
    """``torch.optim.SGD`` with a momentum.

    Attributes:
        nesterov: look ahead by one more momentum.
    """

    nesterov: bool = False

    coefficients = ("lr", "kept", "new", "ahead", "sign")

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum",)

    @staticmethod
    def numbers(
        lr: float, momentum: float, *, dampening: float = 0.0, first: bool = False, maximize: bool = False
    ) -> tuple[float, ...]:
        """Coefficients.

        Args:
            lr: learning rate.
            momentum: share of the buffer that is kept.
            dampening: share of the gradient that does not enter the buffer.
            first: the buffer begins with this gradient, undampened.
            maximize: follow the gradient upwards.
        """
        sign = -1.0 if maximize else 1.0
        kept, new = (0.0, 1.0) if first else (momentum, 1 - dampening)
        return lr, kept, sign * new, momentum, sign

    def formula(
        self, param: Tensor, grad: Tensor, scale: Tensor, states: Sequence[Tensor], c: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        momentum = c["kept"] * states[0] + (c["new"] * scale) * grad
        direction = (c["sign"] * scale) * grad + c["ahead"] * momentum if self.nesterov else momentum
        return param - c["lr"] * direction, momentum
