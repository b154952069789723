"""Stochastic gradient descent with momentum."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_ort.updates.rule import Rule

__all__ = ["Momentum"]


@dataclasses.dataclass(frozen=True)
class Momentum(Rule):
    """``torch.optim.SGD`` with a momentum and without dampening.

    Attributes:
        nesterov: look ahead by one more momentum.
    """

    nesterov: bool = False

    states = ("momentum",)
    coefficients = ("lr", "kept")

    def formula(
        self, param: Tensor, grad: Tensor, scale: Tensor, states: Sequence[Tensor], c: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        scaled = scale * grad
        momentum = c["kept"] * states[0] + scaled
        direction = scaled + c["kept"] * momentum if self.nesterov else momentum
        return param - c["lr"] * direction, momentum
