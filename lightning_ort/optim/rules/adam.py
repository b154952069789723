"""What Adam and its kin have in common: running means of the gradient and of its square."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_ort.optim.rules.rule import Rule

__all__ = ["Adam", "Adamax", "Lamb", "NAdam", "RAdam", "TwoMoments"]


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


@dataclasses.dataclass(frozen=True)
class Lamb(TwoMoments):
    """LAMB (You et al., 2020) with a clamped trust ratio."""

    coefficients = (*TwoMoments.coefficients, "epsilon", "corrected", "decay", "lr", "ratio_min", "ratio_max")
    elementwise = False

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
        ratio_min: float,
        ratio_max: float,
    ) -> tuple[float, ...]:
        """Coefficients of update number ``count``, which starts at 1; see :meth:`Adam.numbers`."""
        first = 1 - alpha**count if bias_correction else 1.0
        # a power, so that lr and count may be tensors
        second = (1 - beta**count) ** 0.5 if bias_correction else 1.0
        shares = Lamb.shares(alpha, beta)
        return *shares, epsilon * second, second / first, weight_decay, lr, ratio_min, ratio_max

    def formula(
        self, param: Tensor, grad: Tensor, scale: Tensor, states: Sequence[Tensor], c: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        moment_1, moment_2 = self.moments(grad, scale, states, c)
        direction = c["decay"] * param + moment_1 / (moment_2.sqrt() + c["epsilon"]) * c["corrected"]
        length, reach = param.dot(param).sqrt(), direction.dot(direction).sqrt()
        ratio = (length / reach).maximum(c["ratio_min"]).minimum(c["ratio_max"])
        # a weight or a direction of zero has no ratio
        ratio = torch.where((length > 0) & (reach > 0), ratio, torch.ones_like(ratio))
        return param - (c["lr"] * ratio) * direction, moment_1, moment_2
