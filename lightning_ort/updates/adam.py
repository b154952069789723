"""Adam with decoupled weight decay, and its variant with the largest second moment."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

from lightning_ort.updates.two_moments import TwoMoments

__all__ = ["Adam"]


@dataclasses.dataclass(frozen=True)
class Adam(TwoMoments):
    """Adam, as ``torch.optim.AdamW`` or as the AdamW of Hugging Face's first transformers.

    Attributes:
        decay: the weight decay is taken from the weight ``"before"`` or ``"after"`` its update, or there is ``"none"``.
        amsgrad: divide by the root of the largest second moment so far.
    """

    decay: Literal["before", "after", "none"] = "before"
    amsgrad: bool = False

    coefficients = (*TwoMoments.coefficients, "epsilon", "step", "kept")

    @property
    def states(self) -> tuple[str, ...]:
        return (*super().states, *["largest_2"] * self.amsgrad)

    @staticmethod
    def numbers(
        lr: float,
        alpha: float,
        beta: float,
        epsilon: float,
        weight_decay: float,
        count: float,
        *,
        bias_correction: bool,
        scaled_epsilon: bool,
        maximize: bool = False,
    ) -> tuple[float, ...]:
        """Coefficients of update number ``count``, which starts at 1.

        Args:
            lr: learning rate.
            alpha: of the first moment; torch's beta1.
            beta: of the second moment; torch's beta2.
            epsilon: added to the root of the second moment,
            weight_decay: share of the weight that is taken away, times ``lr``.
            count: number of this update.
            bias_correction: whether the moments, which start at zero, are corrected for that.
            scaled_epsilon: add ``epsilon`` to the corrected root, as torch does, and not to the root of the moment.
            maximize: follow the gradient upwards.
        """
        first = 1 - alpha**count if bias_correction else 1.0
        # a power, so that lr and count may be tensors
        second = (1 - beta**count) ** 0.5 if bias_correction else 1.0
        # m / first / (sqrt(v) / second + epsilon), with all scalar factors drawn together
        epsilon = epsilon * second if scaled_epsilon else epsilon
        shares = Adam.shares(alpha, beta, maximize=maximize)
        return *shares, epsilon, lr * second / first, 1 - lr * weight_decay

    def formula(
        self, param: Tensor, grad: Tensor, scale: Tensor, states: Sequence[Tensor], c: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        moment_1, moment_2 = self.moments(grad, scale, states, c)
        largest = [past.maximum(moment_2) for past in states[2:]]
        update = moment_1 / ((*largest, moment_2)[0].sqrt() + c["epsilon"]) * c["step"]
        if self.decay == "before":
            param = c["kept"] * param - update
        else:
            param = param - update
            if self.decay == "after":
                param = c["kept"] * param
        return param, moment_1, moment_2, *largest
