"""LAMB as a torch optimizer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_ort.optim.adam_like import AdamLike, Params

__all__ = ["Lamb"]


class Lamb(AdamLike):
    """LAMB (You et al., "Large batch optimization for deep learning", 2020): Adam's direction, with a step per tensor
    in proportion to the length of the weight.

    Args:
        params: parameters, or groups of them, as ``torch.optim`` takes them.
        lr: learning rate.
        betas: decay of the first and the second moment.
        eps: keeps the division finite.
        weight_decay: share of the weight that is a part of the direction.
        bias_correction: correct the moments for having started at zero.
        ratio_min: smallest trust ratio, the length of the weight divided by that of the direction.
        ratio_max: largest trust ratio. Where one of the two lengths is 0, the ratio is 1.
        max_norm: the gradients of a group are divided by ``norm / max_norm`` where ``norm``, that of all gradients
            of the optimizer, is larger.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        ratio_min: float = -math.inf,
        ratio_max: float = math.inf,
        max_norm: float = math.inf,
    ) -> None:
        if not ratio_min <= ratio_max:
            raise ValueError(f"ratio_min={ratio_min!r} is larger than ratio_max={ratio_max!r}.")
        ratios = {"ratio_min": ratio_min, "ratio_max": ratio_max}
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction, max_norm, **ratios)

    def _apply(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = self._corrections(state, group)
        root = state["exp_avg_sq"].sqrt().div_(second).add_(group["eps"])
        direction = (state["exp_avg"] / root).div_(first).add_(p, alpha=group["weight_decay"])
        length, reach = torch.linalg.vector_norm(p), torch.linalg.vector_norm(direction)
        ratio = (length / reach).clamp(group["ratio_min"], group["ratio_max"])
        ratio = torch.where((length > 0) & (reach > 0), ratio, torch.ones_like(ratio))
        p.sub_(direction * (float(group["lr"]) * ratio))
