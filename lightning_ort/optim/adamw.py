"""AdamW with the settings that AdamConfig has and torch.optim.AdamW has not."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from lightning_ort.optim.adam_like import AdamLike, Params

__all__ = ["AdamW"]


class AdamW(AdamLike):
    """``torch.optim.AdamW`` with three more settings; each at its default, it computes the same.

    Args:
        params: parameters, or groups of them, as ``torch.optim`` takes them.
        lr: learning rate.
        betas: decay of the first and the second moment.
        eps: keeps the division finite.
        weight_decay: share of the weight that is taken away, times ``lr``.
        bias_correction: correct the moments for having started at zero.
        decay_after: take the weight decay from the new weight, and add ``eps`` to the root of the second moment before
            its correction: the AdamW of Hugging Face's first transformers.
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
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        bias_correction: bool = True,
        decay_after: bool = False,
        max_norm: float = math.inf,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction, max_norm, decay_after=decay_after)

    def _apply(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = self._corrections(state, group)
        lr, kept = float(group["lr"]), 1 - float(group["lr"]) * group["weight_decay"]
        if group["decay_after"]:
            p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-lr * second / first)
            p.mul_(kept)
        else:
            root = state["exp_avg_sq"].sqrt().div_(second).add_(group["eps"])
            p.mul_(kept).addcdiv_(state["exp_avg"], root, value=-lr / first)
