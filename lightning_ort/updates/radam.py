"""Adam with a rectified second moment."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_ort.updates.two_moments import TwoMoments

__all__ = ["RAdam"]


@dataclasses.dataclass(frozen=True)
class RAdam(TwoMoments):
    """Adam that trusts its second moment only once that is known well enough, as ``torch.optim.RAdam``.

    Attributes:
        decay: the weight decay is taken from the weight before its update.
    """

    decay: bool = False

    coefficients = (*TwoMoments.coefficients, "epsilon", "adaptive", "plain", "kept")

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
        return *RAdam.shares(alpha, beta, maximize=maximize), epsilon, adaptive, plain, 1 - lr * weight_decay

    def formula(
        self, param: Tensor, grad: Tensor, scale: Tensor, states: Sequence[Tensor], c: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        moment_1, moment_2 = self.moments(grad, scale, states, c)
        update = moment_1 * (c["adaptive"] / (moment_2.sqrt() + c["epsilon"]) + c["plain"])
        return (c["kept"] * param if self.decay else param) - update, moment_1, moment_2
