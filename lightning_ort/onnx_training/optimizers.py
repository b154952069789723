"""The optimizers of a TrainingSession: attributes of each weight, states, and the update that applies them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_ort.onnx_training.parameters import TrainingParameters
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.updates import SGD, Adam, Lamb, Rule, Update

__all__ = ["Hyperparameters", "WeightUpdate"]

SHARED = "shared_optimizer_state"
"""where LAMB keeps the counter that all weights share"""


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """Attributes of the optimizer node of one weight, with the defaults of ONNX Runtime's operators.

    ``lambda`` of the attribute map is the weight decay.
    """

    alpha: float = 0.9
    beta: float = 0.999
    weight_decay: float = 0.0
    epsilon: float = 1e-6
    max_norm_clip: float = 1.0
    ratio_min: float = -math.inf
    ratio_max: float = math.inf
    do_bias_correction: int = 1
    weight_decay_mode: int = 0


_ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "AdamOptimizer": (
        {"alpha", "beta", "lambda", "epsilon", "max_norm_clip"},
        {"do_bias_correction", "weight_decay_mode"},
    ),
    "LambOptimizer": (
        {"alpha", "beta", "lambda", "epsilon", "max_norm_clip", "ratio_min", "ratio_max"},
        {"do_bias_correction"},
    ),
    "SGDOptimizer": (set(), set()),
}
_EQUAL = {"AdamOptimizer": ("weight_decay_mode",), "LambOptimizer": ("ratio_min", "ratio_max", "do_bias_correction")}


def _hyperparameters(name: str, weight: str, floats: Mapping[str, Any], ints: Mapping[str, Any]) -> Hyperparameters:
    for kind, given, allowed in zip(("float", "int"), (floats, ints), _ALLOWED[name], strict=True):
        unknown = sorted(set(given) - allowed)
        if unknown:
            raise ValueError(
                f"{name} of weight {weight!r} has no {kind} attribute {', '.join(map(repr, unknown))}. "
                f"It has: {', '.join(sorted(allowed)) or 'none'}."
            )
    values = {("weight_decay" if k == "lambda" else k): float(v) for k, v in floats.items()}
    return Hyperparameters(**values, **{k: int(v) for k, v in ints.items()})  # type: ignore[arg-type]


class WeightUpdate:
    """Optimizer states and their update, for all trained weights.

    Args:
        parameters: names the optimizer, its attributes and whether to clip.
        weights: name to tensor, changed in place.
        config: how sessions are made.

    Attributes:
        counts: per weight how many updates it has had.
        states: per weight the tensors of the rule, by name.
    """

    def __init__(
        self, parameters: TrainingParameters, weights: Mapping[str, torch.Tensor], config: RuntimeConfig
    ) -> None:
        self.name: str = parameters.training_optimizer_name
        if self.name not in _ALLOWED:
            raise ValueError(
                f"training_optimizer_name is {self.name!r}; expected one of {', '.join(_ALLOWED)}, or '' for none."
            )
        self._weights = dict(weights)
        floats, ints = parameters.optimizer_attributes_map, parameters.optimizer_int_attributes_map
        for attribute, given in (("optimizer_attributes_map", floats), ("optimizer_int_attributes_map", ints)):
            unknown = sorted(set(given) - set(weights))
            if unknown:
                raise ValueError(f"{attribute} names {', '.join(map(repr, unknown))}, which are not trained.")
        defaults = {"do_bias_correction": 0} if self.name == "LambOptimizer" else {}
        each = [_hyperparameters(self.name, w, floats.get(w, {}), (defaults | dict(ints.get(w, {})))) for w in weights]
        for attribute in _EQUAL.get(self.name, ()):
            if len({getattr(h, attribute) for h in each}) > 1:
                raise ValueError(f"{self.name}: {attribute} must be the same for all weights.")
        # SGD was never clipped
        self._clip = bool(parameters.enable_grad_norm_clip) and self.name != "SGDOptimizer"
        keys = [(h, w.dtype) for h, w in zip(each, weights.values(), strict=True)]
        distinct = list(dict.fromkeys(keys))
        self._groups = [distinct.index(k) for k in keys]
        self._hyperparameters = [h for h, _ in distinct]
        self._rule = _rule(self.name, each[0])
        self.counts = dict.fromkeys(weights, 0)
        self.states = {
            w: {s: torch.zeros_like(t, memory_format=torch.contiguous_format) for s in self._rule.states}
            for w, t in self._weights.items()
        }
        self._update = Update(
            self._rule,
            list(self._weights.values()),
            [list(s.values()) for s in self.states.values()],
            self._groups,
            config,
            clip=self._clip,
            guard=parameters.loss_scale > 0,
        )
        self.model = self._update.model

    def run(self, gradients: Sequence[torch.Tensor], lr: float, scale: float) -> bool:
        """Update all weights by ``gradients`` times ``scale``; whether they were finite (and so anything changed)."""
        # weights that have had other numbers of updates would need groups of their own
        count = max(self.counts.values(), default=0) + 1
        for group, h in enumerate(self._hyperparameters):
            self._update.coefficients[group].copy_(torch.tensor(self._numbers(h, lr, count), dtype=torch.float64))
        limits = [h.max_norm_clip for h in self._hyperparameters] if self._clip else None
        finite = self._update.run(gradients, scale=scale, limits=limits)
        if finite:
            self.counts = dict.fromkeys(self.counts, count)
        return finite

    def _numbers(self, h: Hyperparameters, lr: float, count: int) -> tuple[float, ...]:
        if isinstance(self._rule, SGD):
            return (lr,)
        common = (lr, h.alpha, h.beta, h.epsilon, h.weight_decay, count)
        corrected = bool(h.do_bias_correction)
        if isinstance(self._rule, Lamb):
            return Lamb.numbers(*common, bias_correction=corrected, ratio_min=h.ratio_min, ratio_max=h.ratio_max)
        return Adam.numbers(*common, bias_correction=corrected, scaled_epsilon=h.weight_decay_mode == 0)

    # -- states as the reference page names them --------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Per weight ``Moment_1``, ``Moment_2`` and ``Update_Count``, an int64 that starts at 1; empty for SGD."""
        if not self._rule.states:
            return {}
        found = {w: {_title(s): t for s, t in states.items()} for w, states in self.states.items()}
        if self.name == "LambOptimizer":
            found[SHARED] = {"Step": torch.tensor([max(self.counts.values(), default=0) + 1])}
        else:
            for w, states in found.items():
                states["Update_Count"] = torch.tensor([self.counts[w] + 1])
        return found

    def check(self, state: Mapping[str, Mapping[str, Any]]) -> list[tuple[torch.Tensor | None, torch.Tensor]]:
        """(target, value) of every entry; a counter has no target. Nothing is changed.

        Raises:
            ValueError: an unknown weight or state, another shape, or counters that differ among the weights.
        """
        own = self.state()
        assignments: list[tuple[torch.Tensor | None, torch.Tensor]] = []
        counts = set()
        for weight, values in state.items():
            for name, value in values.items():
                if weight not in own or name not in own[weight]:
                    raise ValueError(f"The optimizer has no state {name!r} of {weight!r}.")
                target, tensor = own[weight][name], torch.as_tensor(value)
                if tuple(target.shape) != tuple(tensor.shape):
                    raise ValueError(
                        f"Optimizer state {name!r} of {weight!r} has shape {tuple(tensor.shape)}; expected "
                        f"{tuple(target.shape)}."
                    )
                if name in ("Update_Count", "Step"):
                    counts.add(int(tensor))
                    assignments.append((None, tensor))
                else:
                    assignments.append((target, tensor))
        if len(counts) > 1:
            raise ValueError(f"Weights have had different numbers of updates ({sorted(counts)}); expected one number.")
        if any(c < 1 for c in counts):
            raise ValueError(f"Update_Count is {min(counts)}; it starts at 1.")
        return assignments

    def assign(self, assignments: Sequence[tuple[torch.Tensor | None, torch.Tensor]]) -> None:
        """Take what :meth:`check` has found."""
        for target, value in assignments:
            if target is None:
                self.counts = dict.fromkeys(self.counts, int(value) - 1)
            else:
                target.copy_(value)


def _title(state: str) -> str:
    return state.title()  # moment_1 -> Moment_1


def _rule(name: str, h: Hyperparameters) -> Rule:
    if name == "SGDOptimizer":
        return SGD()
    if name == "LambOptimizer":
        return Lamb()
    if h.weight_decay_mode not in (0, 1):
        raise ValueError(f"weight_decay_mode is {h.weight_decay_mode}; expected 0 (before) or 1 (after the update).")
    return Adam(decay="after" if h.weight_decay_mode else "before")
