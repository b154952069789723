"""Adam with a rectified second moment."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_ort.updates.rule import Rule

__all__ = ["RAdam"]


@dataclasses.dataclass(frozen=True)
class RAdam(Rule):
    """Adam that trusts its second moment only once that is known well enough, as ``torch.optim.RAdam``.

    Attributes:
        decay: the weight decay is taken from the weight before its update.
    """

    decay: bool = False

    coefficients = ("alpha", "new_1", "beta", "new_2", "epsilon", "adaptive", "plain", "kept")

    @property
    def states(self) -> tuple[str, ...]:
        return ("moment_1", "moment_2")

    @staticmethod
    def numbers(
        lr: float,
        alpha: float,
        beta: float,
        epsilon: float,
        weight_decay: float,
        count: float,
        *,
        maximize: bool = False,
    ) -> tuple[float, ...]:
        """Coefficients of update number ``count``, which starts at 1; see :meth:`Adam.numbers`."""
        first, second = 1 - alpha**count, 1 - beta**count
        longest = 2 / (1 - beta) - 1
        length = longest - 2 * count * beta**count / second
        if length > 5:
            share = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
            adaptive, plain = lr / first * math.sqrt(second * share), 0.0
        else:
            # the root is divided by, though the result is multiplied by 0
            adaptive, plain, epsilon = 0.0, lr / first, 1.0
        new = alpha - 1 if maximize else 1 - alpha
        return alpha, new, beta, math.sqrt(1 - beta), epsilon, adaptive, plain, 1 - lr * weight_decay

    def formula(
        self, param: Tensor, grad: Tensor, scale: Tensor, states: Sequence[Tensor], c: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        moment_1, moment_2 = states
        moment_1 = c["alpha"] * moment_1 + (c["new_1"] * scale) * grad
        root = (c["new_2"] * scale) * grad
        moment_2 = c["beta"] * moment_2 + root * root
        update = moment_1 * (c["adaptive"] / (moment_2.sqrt() + c["epsilon"]) + c["plain"])
        return (c["kept"] * param if self.decay else param) - update, moment_1, moment_2
