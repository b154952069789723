"""What an update rule consists of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

__all__ = ["Decayed", "Rule"]


class Rule:
    """How one parameter and its states change by its gradient.

    A rule has two halves. What depends on numbers alone (bias corrections, products of learning rate and decay) is
    computed in Python, in float64, by a method of the rule that returns its :attr:`coefficients`; what depends on
    tensors is :attr:`formula`, which becomes a part of an ONNX graph. Coefficients are inputs of that graph, so that
    nothing is compiled again when they change. Rules are compared by their attributes.

    Attributes:
        states: names of the tensors kept per parameter, each shaped like it.
        coefficients: names of the numbers that the formula reads, one set per group of parameters.
        elementwise: each element changes by itself; such a rule may be applied to parts of a tensor, or to several
            tensors joined.
    """

    coefficients: ClassVar[tuple[str, ...]] = ()
    elementwise: ClassVar[bool] = True

    @property
    def states(self) -> tuple[str, ...]:
        return ()

    def formula(
        self, param: Tensor, grad: Tensor, scale: Tensor, states: Sequence[Tensor], c: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """New values of the parameter and its states, in functional torch calls.

        Args:
            param: one-dimensional, like ``grad`` and all ``states``.
            grad: to be multiplied by ``scale`` (1 / accumulated steps, 1 / loss scale, clipping) before it is used.
            scale: a scalar tensor.
            states: in the order of :attr:`states`.
            c: coefficient name to a scalar tensor.
        """
        raise NotImplementedError


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
