"""The settings of an optimizer, and the coefficients that follow from them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

from lightning_ort.optim.rules import SGD, Adam, Decayed, FusedAdam, Lamb, Momentum, Rule
from lightning_ort.validation import flag, is_number, number, shown, single

__all__ = ["KINDS", "Kind", "OptimizerSettings"]

Kind = Literal["AdamW", "Adam", "SGD", "Lamb"]
KINDS = get_args(Kind)


def _number(name: str, value: Any, **bounds: Any) -> float:
    return number(f"Optimizer: {name}", single(value), **bounds)


_EPS = {"Lamb": 1e-6}
"""Defaults of ``eps`` that are not Adam's: those of :class:`~lightning_ort.optim.Lamb` and of ORTTrainer."""


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """An optimizer, for one parameter, a group of them, or all.

    ``AdamW``, ``Adam`` and ``SGD`` are those of ``torch.optim``, but none of them decays weights unless told to;
    ``Lamb`` is that of You et al. (2020).

    Attributes:
        kind: one of ``"AdamW"`` (decay of the weight), ``"Adam"`` (decay in the gradient), ``"SGD"``, ``"Lamb"``.
        lr: learning rate of the first update.
        betas: of the two moments (not for SGD).
        eps: added to the root of the second moment; by default 1e-8, of LAMB 1e-6.
        weight_decay: for AdamW and LAMB times the weight, for Adam and SGD added to the gradient times the weight.
        bias_correction: correct the moments for having started at zero.
        decay: AdamW takes the decay from the weight ``"before"`` the update, as torch does, or ``"after"`` it, as
            the operator AdamWOptimizer with ``adam_mode=1`` does (which then adds ``eps`` to the moment's root before
            the bias is corrected).
        momentum: of SGD.
        nesterov: of SGD.
        ratio_min: bound of LAMB's trust ratio.
        ratio_max: bound of LAMB's trust ratio.
        clip_grad_norm: largest norm of all gradients together, or ``None``.

    Raises:
        TypeError: a setting of another type.
        ValueError: a number that is not possible, or that this kind does not know.
    """

    kind: Kind = "AdamW"
    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = None  # type: ignore[assignment]  # the kind's, until it has been looked at
    weight_decay: float = 0.0
    bias_correction: bool = True
    decay: Literal["before", "after"] = "before"
    momentum: float = 0.0
    nesterov: bool = False
    ratio_min: float = -math.inf
    ratio_max: float = math.inf
    clip_grad_norm: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"The optimizer is {shown(self.kind)}; expected one of {', '.join(KINDS)}.")
        usual_eps = _EPS.get(self.kind, 1e-8)
        if self.eps is None:
            object.__setattr__(self, "eps", usual_eps)
        try:
            betas: tuple[Any, ...] = tuple(self.betas)
        except TypeError:
            betas = ()
        if len(betas) != 2 or not all(is_number(b) and 0 <= b < 1 for b in betas):
            raise ValueError(f"Optimizer: betas={self.betas!r}: expected two numbers from 0 to below 1.")
        object.__setattr__(self, "betas", tuple(float(b) for b in betas))
        for name in ("lr", "eps", "weight_decay", "momentum"):
            object.__setattr__(self, name, _number(name, getattr(self, name), low=0))
        for name in ("ratio_min", "ratio_max"):
            object.__setattr__(self, name, _number(name, getattr(self, name), infinite=True))
        if self.clip_grad_norm is not None:
            object.__setattr__(
                self, "clip_grad_norm", _number("clip_grad_norm", self.clip_grad_norm, above=0, other=", or None")
            )
        for name in ("bias_correction", "nesterov"):
            flag(f"Optimizer: {name}", getattr(self, name))
        wrong = [
            (self.nesterov and not self.momentum, "nesterov=True needs a momentum"),
            (
                self.ratio_min == math.inf or self.ratio_max == -math.inf,
                f"ratio_min={self.ratio_min!r}, ratio_max={self.ratio_max!r}: expected room for a finite ratio",
            ),
            (self.ratio_min > self.ratio_max, f"ratio_min={self.ratio_min!r} is above ratio_max={self.ratio_max!r}"),
            (self.decay not in ("before", "after"), f"decay={shown(self.decay)}: expected 'before' or 'after'"),
        ]
        foreign = {
            "betas": ("AdamW", "Adam", "Lamb"),
            "eps": ("AdamW", "Adam", "Lamb"),
            "bias_correction": ("AdamW", "Adam", "Lamb"),
            "decay": ("AdamW",),
            "momentum": ("SGD",),
            "nesterov": ("SGD",),
            "ratio_min": ("Lamb",),
            "ratio_max": ("Lamb",),
        }
        for field in dataclasses.fields(self):
            given = getattr(self, field.name) != (usual_eps if field.name == "eps" else field.default)
            if given and self.kind not in foreign.get(field.name, KINDS):
                wrong.append((True, f"{field.name}={getattr(self, field.name)!r}: {self.kind} has no such setting"))
        for found, message in wrong:
            if found:
                raise ValueError(f"Optimizer: {message}.")

    def rule_for(self, *, decays: bool) -> Rule:
        """Return what one update computes, with a weight decay (which may be 0) or without.

        Parameters that are updated together have one rule, also where only some of them decay.
        """
        if self.kind == "Lamb":
            return Lamb()
        if self.kind == "AdamW":
            return Adam(self.decay if decays else "none")
        rule: Rule = SGD()
        if self.kind == "Adam":
            rule = Adam("none")
        elif self.momentum:
            rule = Momentum(self.nesterov)
        return Decayed(rule) if decays else rule

    @functools.cached_property
    def rule(self) -> Rule:
        """What one update computes."""
        return self.rule_for(decays=bool(self.weight_decay))

    @functools.cached_property
    def states(self) -> tuple[str, ...]:
        """Names of the tensors that are kept per parameter: ``moment_1`` and ``moment_2``, ``momentum``, or none."""
        return self.rule.states

    @functools.cached_property
    def fused_numbers(self) -> Callable[[float, int], tuple[float, ...]]:
        """For Adam and AdamW: what :meth:`numbers` is for a :class:`~lightning_ort.optim.rules.FusedAdam`."""
        decay = self.weight_decay if self.kind == "AdamW" else 0.0
        corrected, scaled = self.bias_correction, self.decay == "before"
        return FusedAdam.formula(*self.betas, self.eps, decay, bias_correction=corrected, scaled_epsilon=scaled)

    def numbers(self, lr: Any, count: Any, rule: Rule | None = None) -> tuple[Any, ...]:
        """Return the coefficients of ``rule``.

        Args:
            lr: learning rate; a float, or a float64 tensor.
            count: number of this update, from 1; an int, or a float64 tensor.
            rule: from :meth:`rule_for`; by default :attr:`rule`.
        """
        if self.kind == "SGD":
            numbers: tuple[Any, ...] = Momentum.numbers(lr, self.momentum) if self.momentum else (lr,)
        else:
            common = (lr, *self.betas, self.eps, self.weight_decay if self.kind != "Adam" else 0.0, count)
            if self.kind == "Lamb":
                return Lamb.numbers(
                    *common,
                    bias_correction=self.bias_correction,
                    ratio_min=self.ratio_min,
                    ratio_max=self.ratio_max,
                )
            scaled = self.decay == "before"
            numbers = Adam.numbers(*common, bias_correction=self.bias_correction, scaled_epsilon=scaled)
        return (*numbers, self.weight_decay) if isinstance(rule or self.rule, Decayed) else numbers
