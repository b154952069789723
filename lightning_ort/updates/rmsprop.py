"""The gradient divided by a running root mean square of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_ort.updates.rule import Rule

__all__ = ["RMSprop"]


@dataclasses.dataclass(frozen=True)
class RMSprop(Rule):
    """As ``torch.optim.RMSprop``.

    Attributes:
        centered: divide by the standard deviation.
        momentum: there is a momentum.
    """

    centered: bool = False
    momentum: bool = False

    coefficients = ("lr", "alpha", "new", "epsilon", "momentum", "sign")

    @property
    def states(self) -> tuple[str, ...]:
        return ("square", *["mean"] * self.centered, *["momentum"] * self.momentum)

    @staticmethod
    def numbers(
        lr: float, alpha: float, epsilon: float, momentum: float, *, maximize: bool = False
    ) -> tuple[float, ...]:
        """Coefficients: learning rate, share of the averages that is kept, and so on."""
        return lr, alpha, 1 - alpha, epsilon, momentum, -1.0 if maximize else 1.0

    def formula(
        self, param: Tensor, grad: Tensor, scale: Tensor, states: Sequence[Tensor], c: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        new = dict(zip(self.states, states, strict=True))
        gradient = (c["sign"] * scale) * grad
        variance = new["square"] = c["alpha"] * new["square"] + (c["new"] * gradient) * gradient
        if self.centered:
            # written as torch does: the difference below may cancel most digits
            new["mean"] = new["mean"] + c["new"] * (gradient - new["mean"])
            variance = variance - new["mean"] * new["mean"]
        step = gradient / (variance.sqrt() + c["epsilon"])
        if self.momentum:
            step = new["momentum"] = c["momentum"] * new["momentum"] + step
        return param - c["lr"] * step, *new.values()
