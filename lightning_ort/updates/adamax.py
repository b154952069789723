"""Adam with the largest gradient in the place of the second moment."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_ort.updates.rule import Rule

__all__ = ["Adamax"]


@dataclasses.dataclass(frozen=True)
class Adamax(Rule):
    """Adam by the infinity norm, as ``torch.optim.Adamax``."""

    coefficients = ("alpha", "new", "beta", "epsilon", "step")

    @property
    def states(self) -> tuple[str, ...]:
        return ("moment", "largest")

    @staticmethod
    def numbers(
        lr: float, alpha: float, beta: float, epsilon: float, count: float, *, maximize: bool = False
    ) -> tuple[float, ...]:
        """Coefficients of update number ``count``, which starts at 1; see :meth:`Adam.numbers`."""
        new = alpha - 1 if maximize else 1 - alpha
        return alpha, new, beta, epsilon, lr / (1 - alpha**count)

    def formula(
        self, param: Tensor, grad: Tensor, scale: Tensor, states: Sequence[Tensor], c: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        moment, largest = states
        moment = c["alpha"] * moment + (c["new"] * scale) * grad
        largest = (c["beta"] * largest).maximum((scale * grad).abs() + c["epsilon"])
        return param - c["step"] * (moment / largest), moment, largest
