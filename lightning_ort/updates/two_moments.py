"""What Adam and its kin have in common: running means of the gradient and of its square."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from lightning_ort.updates.rule import Rule

__all__ = ["TwoMoments"]


class TwoMoments(Rule):
    """A rule with a first and a second moment."""

    coefficients: ClassVar[tuple[str, ...]] = ("alpha", "new_1", "beta", "new_2")

    @property
    def states(self) -> tuple[str, ...]:
        return ("moment_1", "moment_2")

    @staticmethod
    def shares(alpha: float, beta: float, *, maximize: bool = False) -> tuple[float, float, float, float]:
        """Coefficients of :meth:`moments`.

        Args:
            alpha: share of the first moment that stays; torch's beta1.
            beta: share of the second moment that stays; torch's beta2.
            maximize: follow the gradient upwards.
        """
        return alpha, alpha - 1 if maximize else 1 - alpha, beta, math.sqrt(1 - beta)

    @staticmethod
    def moments(
        grad: Tensor, scale: Tensor, states: Sequence[Tensor], c: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """New values of the first two ``states``; arguments as of :meth:`Rule.formula`."""
        moment_1, moment_2 = states[:2]
        moment_1 = c["alpha"] * moment_1 + (c["new_1"] * scale) * grad
        # squared after scaling: the square of a gradient times the loss scale could overflow
        root = (c["new_2"] * scale) * grad
        return moment_1, c["beta"] * moment_2 + root * root
