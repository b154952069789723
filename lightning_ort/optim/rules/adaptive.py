"""Adagrad, Adadelta, RMSprop: the gradient divided by the root of a sum or a running mean of its squares."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_ort.optim.rules.rule import Rule

__all__ = ["Adadelta", "Adagrad", "RMSprop"]


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
