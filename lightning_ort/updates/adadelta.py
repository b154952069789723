"""Steps in the units of the weights: running means of squared steps and squared gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_ort.updates.rule import Rule

__all__ = ["Adadelta"]


@dataclasses.dataclass(frozen=True)
class Adadelta(Rule):
    """As ``torch.optim.Adadelta``."""

    coefficients = ("lr", "rho", "new", "epsilon")

    @property
    def states(self) -> tuple[str, ...]:
        return ("gradients", "steps")

    @staticmethod
    def numbers(lr: float, rho: float, epsilon: float, *, maximize: bool = False) -> tuple[float, ...]:
        """Coefficients."""
        return -lr if maximize else lr, rho, 1 - rho, epsilon

    def formula(
        self, param: Tensor, grad: Tensor, scale: Tensor, states: Sequence[Tensor], c: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        gradients, steps = states
        gradient = scale * grad
        gradients = c["rho"] * gradients + (c["new"] * gradient) * gradient
        step = (steps + c["epsilon"]).sqrt() / (gradients + c["epsilon"]).sqrt() * gradient
        steps = c["rho"] * steps + (c["new"] * step) * step
        return param - c["lr"] * step, gradients, steps
