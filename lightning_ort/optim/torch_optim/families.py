"""What ONNX Runtime must know of a class of torch optimizers to make its updates."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from lightning_ort.optim.kinds import TORCH_STATES
from lightning_ort.optim.optimizers import AdamW, Lamb
from lightning_ort.optim.rules import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    Decayed,
    Momentum,
    NAdam,
    RAdam,
    RMSprop,
    Rule,
)
from lightning_ort.optim.rules import Lamb as LambRule

__all__ = ["FAMILIES", "Family", "Group"]

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


def _penalized(rule: Rule, decay: bool) -> Rule:
    return Decayed(rule) if decay else rule


def _moments(group: Group) -> tuple[float, float, float, float]:
    """Learning rate, betas and epsilon; any of them may be a tensor."""
    alpha, beta = group["betas"]
    return float(group["lr"]), float(alpha), float(beta), float(group["eps"])


class _SGD(Family):
    counters = ()

    def rule(self, group: Group, decay: bool) -> Rule:
        return _penalized(Momentum(bool(group["nesterov"])) if group["momentum"] != 0 else SGD(), decay)

    def names(self, rule: Rule) -> tuple[str, ...]:
        return tuple(TORCH_STATES[state] for state in rule.states)

    def numbers(self, group: Group, count: float, product: float, first: bool) -> tuple[float, ...]:
        lr, momentum, maximize = float(group["lr"]), float(group["momentum"]), bool(group["maximize"])
        if momentum == 0:
            return (-lr if maximize else lr,)
        return Momentum.numbers(lr, momentum, dampening=float(group["dampening"]), first=first, maximize=maximize)


class _Adam(Family):
    def rule(self, group: Group, decay: bool) -> Rule:
        if group["decoupled_weight_decay"]:
            return Adam("before" if decay else "none", bool(group["amsgrad"]))
        return _penalized(Adam("none", bool(group["amsgrad"])), decay)

    def names(self, rule: Rule) -> tuple[str, ...]:
        return tuple(TORCH_STATES[state] for state in rule.states)

    def numbers(self, group: Group, count: float, product: float, first: bool) -> tuple[float, ...]:
        return Adam.numbers(
            *_moments(group),
            float(group["weight_decay"]),
            count,
            bias_correction=True,
            scaled_epsilon=True,
            maximize=bool(group["maximize"]),
        )


class _Adamax(Family):
    def rule(self, group: Group, decay: bool) -> Rule:
        return _penalized(Adamax(), decay)

    def names(self, rule: Rule) -> tuple[str, ...]:
        return ("exp_avg", "exp_inf")

    def numbers(self, group: Group, count: float, product: float, first: bool) -> tuple[float, ...]:
        return Adamax.numbers(*_moments(group), count, maximize=bool(group["maximize"]))


class _NAdam(Family):
    counters = ("step", "mu_product")

    def rule(self, group: Group, decay: bool) -> Rule:
        decoupled = bool(group["decoupled_weight_decay"])
        return NAdam(decay) if decoupled else _penalized(NAdam(), decay)

    def names(self, rule: Rule) -> tuple[str, ...]:
        return tuple(TORCH_STATES[state] for state in rule.states)

    def factor(self, group: Group, count: float) -> float:
        return NAdam.momentum(float(group["betas"][0]), float(group["momentum_decay"]), count)

    def initial(self, p: Tensor, group: Group, names: tuple[str, ...], defaults: Group) -> dict[str, Tensor]:
        states = super().initial(p, group, names, defaults)
        return {"step": states.pop("step"), "mu_product": torch.ones((), dtype=_scalar()), **states}

    def numbers(self, group: Group, count: float, product: float, first: bool) -> tuple[float, ...]:
        return NAdam.numbers(
            *_moments(group),
            float(group["weight_decay"]),
            count,
            momentum_decay=float(group["momentum_decay"]),
            product=product,
            maximize=bool(group["maximize"]),
        )


class _RAdam(Family):
    def rule(self, group: Group, decay: bool) -> Rule:
        decoupled = bool(group["decoupled_weight_decay"])
        return RAdam(decay) if decoupled else _penalized(RAdam(), decay)

    def names(self, rule: Rule) -> tuple[str, ...]:
        return tuple(TORCH_STATES[state] for state in rule.states)

    def numbers(self, group: Group, count: float, product: float, first: bool) -> tuple[float, ...]:
        return RAdam.numbers(*_moments(group), float(group["weight_decay"]), count, maximize=bool(group["maximize"]))


class _RMSprop(Family):
    def rule(self, group: Group, decay: bool) -> Rule:
        return _penalized(RMSprop(bool(group["centered"]), group["momentum"] > 0), decay)

    def names(self, rule: Rule) -> tuple[str, ...]:
        torch_names = {"square": "square_avg", "mean": "grad_avg", "momentum": "momentum_buffer"}
        return tuple(torch_names[state] for state in rule.states)

    def initial(self, p: Tensor, group: Group, names: tuple[str, ...], defaults: Group) -> dict[str, Tensor]:
        states = super().initial(p, group, names, defaults)
        return {name: states[name] for name in ("step", "square_avg", "momentum_buffer", "grad_avg") if name in states}

    def numbers(self, group: Group, count: float, product: float, first: bool) -> tuple[float, ...]:
        return RMSprop.numbers(
            float(group["lr"]),
            float(group["alpha"]),
            float(group["eps"]),
            float(group["momentum"]),
            maximize=bool(group["maximize"]),
        )


class _Adagrad(Family):
    def rule(self, group: Group, decay: bool) -> Rule:
        return _penalized(Adagrad(), decay)

    def names(self, rule: Rule) -> tuple[str, ...]:
        return ("sum",)

    def initial(self, p: Tensor, group: Group, names: tuple[str, ...], defaults: Group) -> dict[str, Tensor]:
        states = super().initial(p, group, names, defaults)
        states["sum"].fill_(defaults["initial_accumulator_value"])
        return states

    def numbers(self, group: Group, count: float, product: float, first: bool) -> tuple[float, ...]:
        return Adagrad.numbers(
            float(group["lr"]),
            float(group["lr_decay"]),
            float(group["eps"]),
            count,
            maximize=bool(group["maximize"]),
        )


class _Adadelta(Family):
    def rule(self, group: Group, decay: bool) -> Rule:
        return _penalized(Adadelta(), decay)

    def names(self, rule: Rule) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")

    def numbers(self, group: Group, count: float, product: float, first: bool) -> tuple[float, ...]:
        return Adadelta.numbers(
            float(group["lr"]), float(group["rho"]), float(group["eps"]), maximize=bool(group["maximize"])
        )


class _AdamLike(Family):
    def names(self, rule: Rule) -> tuple[str, ...]:
        return tuple(TORCH_STATES[state] for state in rule.states)

    def limit(self, group: Group) -> float:
        return float(group["max_norm"])


class _OwnAdamW(_AdamLike):
    def rule(self, group: Group, decay: bool) -> Rule:
        return Adam(("after" if group["decay_after"] else "before") if decay else "none")

    def numbers(self, group: Group, count: float, product: float, first: bool) -> tuple[float, ...]:
        return Adam.numbers(
            *_moments(group),
            float(group["weight_decay"]),
            count,
            bias_correction=bool(group["bias_correction"]),
            scaled_epsilon=not group["decay_after"],
        )


class _Lamb(_AdamLike):
    def rule(self, group: Group, decay: bool) -> Rule:
        return LambRule()

    def numbers(self, group: Group, count: float, product: float, first: bool) -> tuple[float, ...]:
        return LambRule.numbers(
            *_moments(group),
            float(group["weight_decay"]),
            count,
            bias_correction=bool(group["bias_correction"]),
            ratio_min=float(group["ratio_min"]),
            ratio_max=float(group["ratio_max"]),
        )


def _scalar() -> torch.dtype:
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


FAMILIES: dict[type[Optimizer], Family] = {
    optim.SGD: _SGD(),
    optim.Adam: _Adam(),
    optim.AdamW: _Adam(),
    optim.Adamax: _Adamax(),
    optim.NAdam: _NAdam(),
    optim.RAdam: _RAdam(),
    optim.RMSprop: _RMSprop(),
    optim.Adagrad: _Adagrad(),
    optim.Adadelta: _Adadelta(),
    AdamW: _OwnAdamW(),
    Lamb: _Lamb(),
}
"""By the class that ``known_class`` gives: a subclass with a ``step`` of its own may compute something else."""
