"""LAMB: Adam's direction, with a step per tensor in proportion to the length of the weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_ort.updates.two_moments import TwoMoments

__all__ = ["Lamb"]


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
