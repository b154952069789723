"""Plain stochastic gradient descent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_ort.updates.rule import Rule

__all__ = ["SGD"]


@dataclasses.dataclass(frozen=True)
class SGD(Rule):
    """The gradient times the learning rate, taken from the weight."""

    coefficients = ("lr",)

    def formula(
        self, param: Tensor, grad: Tensor, scale: Tensor, states: Sequence[Tensor], c: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        return (param - (c["lr"] * scale) * grad,)
