"""Weight decay as a part of the gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_ort.updates.rule import Rule

__all__ = ["Decayed"]


@dataclasses.dataclass(frozen=True)
class Decayed(Rule):
    """``rule`` with a share of the weight added to its gradient, as ``weight_decay`` of torch's Adam and SGD does.

    The share is the last of the coefficients.
    """

    rule: Rule

    @property
    def states(self) -> tuple[str, ...]:
        return self.rule.states

    @property
    def coefficients(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.rule.coefficients, "weight_decay")

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        return self.rule.elementwise

    def formula(
        self, param: Tensor, grad: Tensor, scale: Tensor, states: Sequence[Tensor], c: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        decayed = scale * grad + c["weight_decay"] * param
        return self.rule.formula(param, decayed, torch.ones_like(scale), states, c)
