"""Which optimizer an artifact holds, with its numbers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_ort.ondevice.state import OptimizerState
from lightning_ort.updates import SGD, Adam, Decayed, FusedAdam, Lamb, Momentum, Rule

__all__ = ["KINDS", "OptimizerConfig"]

KINDS = ("AdamW", "Adam", "SGD", "Lamb")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer for all trained parameters.

    ``AdamW``, ``Adam`` and ``SGD`` are those of ``torch.optim``; ``Lamb`` is that of You et al. (2020).

    Attributes:
        kind: one of ``"AdamW"`` (decay of the weight), ``"Adam"`` (decay in the gradient), ``"SGD"``, ``"Lamb"``.
        lr: learning rate of the first update.
        betas: of the two moments (not for SGD).
        eps: added to the root of the second moment.
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
        ValueError: a number that is not possible, or that this kind does not know.
    """

    kind: Literal["AdamW", "Adam", "SGD", "Lamb"] = "AdamW"
    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
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
            raise ValueError(f"The optimizer is {self.kind!r}; expected one of {', '.join(KINDS)}.")
        object.__setattr__(self, "betas", tuple(float(b) for b in self.betas))
        wrong = [
            (not math.isfinite(self.lr) or self.lr < 0, f"lr={self.lr!r}: expected a number from 0"),
            (
                len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas),
                f"betas={self.betas!r}: expected two numbers from 0 to below 1",
            ),
            (not self.eps >= 0, f"eps={self.eps!r}: expected a number from 0"),
            (not self.weight_decay >= 0, f"weight_decay={self.weight_decay!r}: expected a number from 0"),
            (not self.momentum >= 0, f"momentum={self.momentum!r}: expected a number from 0"),
            (self.nesterov and not self.momentum, "nesterov=True needs a momentum"),
            (
                self.clip_grad_norm is not None and not self.clip_grad_norm > 0,
                f"clip_grad_norm={self.clip_grad_norm!r}: expected a number above 0, or None",
            ),
            (self.decay not in ("before", "after"), f"decay={self.decay!r}: expected 'before' or 'after'"),
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
            given = getattr(self, field.name) != field.default
            if given and self.kind not in foreign.get(field.name, KINDS):
                wrong.append((True, f"{field.name}={getattr(self, field.name)!r}: {self.kind} has no such setting"))
        for found, message in wrong:
            if found:
                raise ValueError(f"Optimizer: {message}.")

    @functools.cached_property
    def rule(self) -> Rule:
        """What one update computes."""
        if self.kind == "Lamb":
            return Lamb()
        if self.kind == "AdamW":
            return Adam(self.decay if self.weight_decay else "none")
        rule: Rule = SGD()
        if self.kind == "Adam":
            rule = Adam("none")
        elif self.momentum:
            rule = Momentum(self.nesterov)
        return Decayed(rule) if self.weight_decay else rule

    @functools.cached_property
    def states(self) -> tuple[str, ...]:
        """Names of the tensors that are kept per parameter: ``moment_1`` and ``moment_2``, ``momentum``, or none."""
        return self.rule.states

    def fresh_state(self, trained: Mapping[str, Tensor]) -> OptimizerState:
        """The state before the first update of the parameters ``trained``."""
        moments = {n: {s: torch.zeros_like(p) for s in self.states} for n, p in trained.items()}
        return OptimizerState(self.kind, self.lr, 0, moments)

    @property
    def fused_numbers(self) -> Callable[[float, int], tuple[float, ...]]:
        """For Adam and AdamW: what :meth:`numbers` is for a :class:`~lightning_ort.updates.FusedAdam`."""
        decay = self.weight_decay if self.kind == "AdamW" else 0.0
        corrected, scaled = self.bias_correction, self.decay == "before"
        return FusedAdam.formula(*self.betas, self.eps, decay, bias_correction=corrected, scaled_epsilon=scaled)

    def numbers(self, lr: Any, count: Any) -> tuple[Any, ...]:
        """Coefficients of :attr:`rule`.

        Args:
            lr: learning rate; a float, or a float64 tensor.
            count: number of this update, from 1; an int, or a float64 tensor.
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
        return (*numbers, self.weight_decay) if isinstance(self.rule, Decayed) else numbers
