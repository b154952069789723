"""The optimizers of a TrainingSession: attributes of each weight, states, and the update that applies them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_ort.checkpoints.names import moments_to_orttrainer
from lightning_ort.distributed.processes import Processes
from lightning_ort.optim.settings import OptimizerSettings
from lightning_ort.optim.sharded_updater import make_updater
from lightning_ort.runtime.factory import SessionFactory
from lightning_ort.training_session.parameters import TrainingParameters
from lightning_ort.validation import number, shown, whole

__all__ = ["WeightUpdate"]

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
_EQUAL = {"AdamOptimizer": ("decay",), "LambOptimizer": ("ratio_min", "ratio_max", "bias_correction")}
_TITLES = {"decay": "weight_decay_mode", "bias_correction": "do_bias_correction"}
_DEFAULTS = {"alpha": 0.9, "beta": 0.999, "lambda": 0.0, "epsilon": 1e-6, "max_norm_clip": 1.0}
"""of ONNX Runtime's operators"""


def _float(attribute: str, value: Any, where: str) -> float:
    if attribute in ("ratio_min", "ratio_max"):
        return number(f"{attribute}{where}", value, infinite=True)
    if attribute == "max_norm_clip":
        return number(f"{attribute}{where}", value, above=0, infinite=True)
    return number(f"{attribute}{where}", value, low=0, below=1 if attribute in ("alpha", "beta") else None)


def _settings(
    name: str, weight: str, floats: Mapping[str, Any], ints: Mapping[str, Any], *, clip: bool
) -> OptimizerSettings:
    """Read the attributes of the optimizer node of one weight; ``lambda`` is the weight decay."""
    for kind, given, allowed in zip(("float", "int"), (floats, ints), _ALLOWED[name], strict=True):
        unknown = sorted(set(given) - allowed)
        if unknown:
            raise ValueError(
                f"{name} of weight {weight!r} has no {kind} attribute {', '.join(map(repr, unknown))}. "
                f"It has: {', '.join(sorted(allowed)) or 'none'}."
            )
    if name == "SGDOptimizer":
        return OptimizerSettings("SGD")
    where = f" of {name} for {weight!r}"
    values = _DEFAULTS | {k: _float(k, v, where) for k, v in floats.items()}
    flags = {k: whole(f"{k}{where}", v, low=0, high=1) for k, v in ints.items()}
    settings: dict[str, Any] = {
        "betas": (values["alpha"], values["beta"]),
        "eps": values["epsilon"],
        "weight_decay": values["lambda"],
        "bias_correction": bool(flags.get("do_bias_correction", name == "AdamOptimizer")),
        "clip_grad_norm": values["max_norm_clip"] if clip and values["max_norm_clip"] < math.inf else None,
    }
    if name == "LambOptimizer":
        settings |= {k: values[k] for k in ("ratio_min", "ratio_max") if k in values}
        return OptimizerSettings("Lamb", **settings)
    return OptimizerSettings("AdamW", **settings, decay="after" if flags.get("weight_decay_mode") else "before")


class WeightUpdate:
    """Optimizer states and their update, for all trained weights.

    Args:
        parameters: names the optimizer, its attributes and whether to clip.
        weights: name to tensor, changed in place.
        sessions: makes them.
        share: keep the states of this process's share of the weights only; with whom.

    Attributes:
        updater: makes the updates; its counts are one less than those in states, which start at 1.
    """

    def __init__(
        self,
        parameters: TrainingParameters,
        weights: Mapping[str, torch.Tensor],
        sessions: SessionFactory,
        share: Processes | None = None,
    ) -> None:
        self.name: str = parameters.training_optimizer_name
        if self.name not in _ALLOWED:
            raise ValueError(
                f"training_optimizer_name is {self.name!r}; expected one of {', '.join(_ALLOWED)}, or '' for none."
            )
        floats, ints = parameters.optimizer_attributes_map, parameters.optimizer_int_attributes_map
        for attribute, given in (("optimizer_attributes_map", floats), ("optimizer_int_attributes_map", ints)):
            for weight, values in given.items():
                if not isinstance(values, Mapping):
                    raise TypeError(
                        f"{attribute} has {shown(values)} for {weight!r}; expected a mapping of attributes."
                    )
            unknown = sorted(map(str, set(given) - set(weights)))
            if unknown:
                raise ValueError(f"{attribute} names {', '.join(map(repr, unknown))}, which are not trained.")
        # SGD was never clipped
        clip = bool(parameters.enable_grad_norm_clip) and self.name != "SGDOptimizer"
        settings = {w: _settings(self.name, w, floats.get(w, {}), ints.get(w, {}), clip=clip) for w in weights}
        for attribute in _EQUAL.get(self.name, ()):
            if len({getattr(s, attribute) for s in settings.values()}) > 1:
                raise ValueError(f"{self.name}: {_TITLES.get(attribute, attribute)} must be the same for all weights.")
        self._parameters, self._weights, self._settings = parameters, weights, settings
        self.updater = make_updater(settings, weights, sessions, guard=parameters.loss_scale > 0, share=share)

    def run(self, gradients: Mapping[str, torch.Tensor], lr: float, scale: float) -> bool:
        """Update all weights by ``gradients`` times ``scale``; whether they were finite (and so anything changed)."""
        return self.updater.step(gradients, lr, scale=scale)

    def replicate(self, processes: Processes, tensors: Mapping[str, torch.Tensor], loads: int) -> None:
        """Give all processes the states and the ``tensors`` of rank 0, which begin with the weights.

        Args:
            processes: who takes part; all call this.
            tensors: weights and running statistics.
            loads: how many states were loaded before.

        Raises:
            ValueError: the processes do not fit together.
            RankError: another process has failed or ended.
        """
        names = ["training_optimizer_name", "gradient_accumulation_steps", "loss_scale", "enable_grad_norm_clip"]
        names += ["allreduce_post_accumulation", "deepspeed_zero_stage", "enable_adasum"]
        facts = {f"TrainingParameters.{n}": getattr(self._parameters, n) for n in names}
        facts |= {f"attributes of {w!r}": settings for w, settings in self._settings.items()}
        shares = bool(self._parameters.deepspeed_zero_stage)
        if shares:
            # the moments of a process are in no other, which could broadcast them
            facts["number of loaded states"] = loads
        processes.agree(facts, tensors, self._weights)
        processes.broadcast(list(tensors.values()))
        if not shares:
            processes.broadcast([t for states in self.updater.moments.values() for t in states.values()])
            self.updater.counts = processes.of_first(self.updater.counts)
            self.updater.forget_plan()

    # -- states as the reference page names them --------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Per weight ``Moment_1``, ``Moment_2`` and ``Update_Count``, an int64 that starts at 1; empty for SGD.

        It has the weights that fall to this process.
        """
        return self._named(self.updater.moments)

    def layout(self) -> dict[str, dict[str, torch.Tensor]]:
        """What :meth:`state` has in all processes together; the moments of others are zero."""
        zeros = {
            w: dict.fromkeys(self.updater.rule.states, t.new_zeros(()).expand_as(t)) for w, t in self._weights.items()
        }
        return self._named(zeros | self.updater.moments)

    def _named(self, moments: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
        counts = {w: self.updater.counts.get(w, 0) + 1 for w in moments}
        states = moments_to_orttrainer(self.name, moments, counts)
        return {w: {n: torch.as_tensor(v) for n, v in values.items()} for w, values in states.items()}

    def check(self, state: Mapping[str, Mapping[str, Any]]) -> list[tuple[torch.Tensor | None, torch.Tensor]]:
        """(target, value) of every entry that falls to this process; a counter has no target. Nothing is changed.

        Raises:
            ValueError: an unknown weight or state, another shape or element type, or counters that differ among the
                weights.
        """
        own, mine = self.layout(), self.state()
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
                if target.dtype != tensor.dtype:
                    raise ValueError(
                        f"Optimizer state {name!r} of {weight!r} is {tensor.dtype}; expected {target.dtype}."
                    )
                if name in ("Update_Count", "Step"):
                    counts.add(int(tensor))
                    assignments.append((None, tensor))
                elif weight in mine:
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
                self.updater.counts = dict.fromkeys(self.updater.counts, int(value) - 1)
                self.updater.forget_plan()
            else:
                target.copy_(value)
