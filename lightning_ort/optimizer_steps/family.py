"""What ONNX Runtime must know of a class of torch optimizers to make its updates."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_ort.updates import Decayed, Rule

__all__ = ["Family", "Group"]

Group = Mapping[str, Any]
"""One of ``param_groups``."""


class Family(abc.ABC):
    """How the settings and states of one torch optimizer go into a rule.

    Attributes:
        counters: names of the states that are single numbers, among them ``step``.
    """

    counters: tuple[str, ...] = ("step",)

    @abc.abstractmethod
    def rule(self, group: Group, decay: bool) -> Rule:
        """What an update of the group computes; with ``decay``, some group has a weight decay."""

    @abc.abstractmethod
    def names(self, rule: Rule) -> tuple[str, ...]:
        """torch's names of the states of ``rule``."""

    @abc.abstractmethod
    def numbers(self, group: Group, count: float, product: float, first: bool) -> tuple[float, ...]:
        """Coefficients of the rule (but for that of :class:`Decayed`).

        Args:
            group: settings.
            count: number of this update, from 1.
            product: see :meth:`factor`.
            first: these parameters had no states before this update.
        """

    def factor(self, group: Group, count: float) -> float:
        """What the second counter is to be multiplied by before this update; for optimizers that have one."""
        return 1.0

    def initial(self, p: Tensor, group: Group, names: tuple[str, ...], defaults: Group) -> dict[str, Tensor]:
        """The states that torch would make for ``p`` in its first step."""
        states: dict[str, Tensor] = {}
        if "step" in self.counters:
            # as torch: beside the parameter where its fused kernel would count
            fused = bool(group.get("fused"))
            wide = torch.get_default_dtype() == torch.float64 and not fused
            dtype = torch.float64 if wide else torch.float32
            states["step"] = torch.zeros((), dtype=dtype, device=p.device if fused else "cpu")
        return states | {name: torch.zeros_like(p, memory_format=torch.preserve_format) for name in names}

    def limit(self, group: Group) -> float:
        """Largest norm of the gradients; infinite where they are not clipped."""
        return float("inf")

    def all_numbers(self, rule: Rule, group: Group, count: float, product: float, first: bool) -> tuple[float, ...]:
        """Coefficients of ``rule``."""
        found = self.numbers(group, count, product, first)
        if isinstance(rule, Decayed):
            # the penalty is added to the gradient before that changes its sign
            decay = float(group["weight_decay"])
            found = (*found, -decay if group["maximize"] else decay)
        return found
