"""Adam with Nesterov's momentum."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_ort.updates.two_moments import TwoMoments

__all__ = ["NAdam"]


@dataclasses.dataclass(frozen=True)
class NAdam(TwoMoments):
    """Adam that looks ahead, as ``torch.optim.NAdam``.

    Attributes:
        decay: the weight decay is taken from the weight before its update.
    """

    decay: bool = False

    coefficients = (*TwoMoments.coefficients, "epsilon", "step", "ahead", "kept")

    @staticmethod
    def momentum(alpha: float, momentum_decay: float, count: float) -> float:
        """The momentum of update number ``count``, which starts at 1."""
        return alpha * (1 - 0.5 * 0.96 ** (count * momentum_decay))

    @staticmethod
    def numbers(
        lr: float,
        alpha: float,
        beta: float,
        epsilon: float,
        weight_decay: float,
        count: float,
        *,
        momentum_decay: float,
        product: float,
        maximize: bool = False,
    ) -> tuple[float, ...]:
        """Coefficients of update number ``count``; see :meth:`Adam.numbers`.

        Args:
            lr: learning rate.
            alpha: of the first moment.
            beta: of the second moment.
            epsilon: added to the corrected root of the second moment.
            weight_decay: share of the weight that is taken away, times ``lr``.
            count: number of this update, from 1.
            momentum_decay: how fast the momentum rises to ``alpha``.
            product: of the momenta of all updates up to this one.
            maximize: follow the gradient upwards.
        """
        now, following = (NAdam.momentum(alpha, momentum_decay, n) for n in (count, count + 1))
        sign, second = -1.0 if maximize else 1.0, math.sqrt(1 - beta**count)
        step, ahead = (1 - now) / (1 - product), following / (1 - product * following)
        shares = NAdam.shares(alpha, beta, maximize=maximize)
        return *shares, epsilon * second, sign * lr * second * step, lr * second * ahead, 1 - lr * weight_decay

    def formula(
        self, param: Tensor, grad: Tensor, scale: Tensor, states: Sequence[Tensor], c: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        moment_1, moment_2 = self.moments(grad, scale, states, c)
        update = ((c["step"] * scale) * grad + c["ahead"] * moment_1) / (moment_2.sqrt() + c["epsilon"])
        return (c["kept"] * param if self.decay else param) - update, moment_1, moment_2
