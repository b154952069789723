"""The optimizer of a trainer: its configuration as settings, and its states as checkpoints have them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_ort.checkpoints.names import SHARED, moments_from_orttrainer, moments_to_orttrainer
from lightning_ort.distributed.processes import Processes
from lightning_ort.optim.config import AdamConfig, LambConfig, SGDConfig, _OptimizerConfig, check_names
from lightning_ort.optim.settings import OptimizerSettings
from lightning_ort.optim.sharded_updater import make_updater
from lightning_ort.runtime.factory import SessionFactory

__all__ = ["Optimizer", "as_array", "check_groups"]


def check_groups(config: _OptimizerConfig, known: Mapping[str, Any]) -> None:
    """Raise if ``config`` does not fit a model with the weights ``known``.

    Raises:
        ValueError: another class, a group that names a weight that does not exist, or ``weight_decay_mode`` differs.
    """
    check_names(config, known, "the model")
    if isinstance(config, AdamConfig) and len({config.hyper_parameters(n)["weight_decay_mode"] for n in known}) > 1:
        raise ValueError("'weight_decay_mode' is the same for all weights; groups cannot differ in it.")


class Optimizer:
    """Updates named parameters by their ``grad``.

    Args:
        config: which optimizer.
        params: name to parameter, those that are trained.
        known: names of all weights of the model.
        sessions: makes them.
        clip: clip Adam's and LAMB's gradients to ``max_norm_clip``.
        guard: skip updates whose gradients are not finite.
        processes: that train copies of the model, or ``None`` if it is this one alone.
        share: keep the states of this process's share of the parameters, as stage 1 of ZeRO does.

    Raises:
        ValueError: a group names a weight that does not exist, or the groups differ in ``weight_decay_mode``.

    Attributes:
        updater: makes the updates; its counts are one less than those in checkpoints, which start at 1.
    """

    def __init__(
        self,
        config: _OptimizerConfig,
        params: Mapping[str, nn.Parameter],
        known: Mapping[str, Any],
        sessions: SessionFactory,
        *,
        clip: bool,
        guard: bool,
        processes: Processes | None = None,
        share: bool = False,
    ) -> None:
        check_groups(config, known)
        self._config, self._params, self._processes = config, dict(params), processes
        hyper = {name: config.hyper_parameters(name) for name in params}
        settings = {name: _settings(config, h, clip=clip) for name, h in hyper.items()}
        self.updater = make_updater(settings, self._params, sessions, guard=guard, share=processes if share else None)

    def parameters(self) -> list[nn.Parameter]:
        """All parameters that are trained."""
        return list(self._params.values())

    def names(self) -> list[str]:
        """Names of all parameters that are trained."""
        return list(self._params)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for p in self._params.values():
            p.grad = None

    def step(self, lr: float, scale: float) -> bool:
        """Update all parameters that have a gradient; arguments and result as of :meth:`Updater.step`."""
        return self.updater.step(self._gradients(), lr, scale=scale)

    def set_aside(self) -> dict[str, Tensor]:
        """Take the gradients away from the parameters."""
        gradients = self._gradients()
        self.zero_grad()
        return gradients

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add what :meth:`set_aside` gave."""
        for name, gradient in gradients.items():
            p = self._params[name]
            p.grad = gradient if p.grad is None else gradient.add_(p.grad)

    def combine(self) -> None:
        """Put what all processes have found in the place of the gradients; errors as of :meth:`Processes.combine`."""
        if self._processes is not None:
            for name, gradient in self._processes.combine(self._gradients(), self._params).items():
                self._params[name].grad = gradient

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._params.items() if p.grad is not None}

    def state(self) -> dict[str, Any]:
        """Copies of the states that this process has, as they stand in checkpoints."""
        return self._named({n: {s: as_array(t) for s, t in m.items()} for n, m in self.updater.moments.items()})

    def layout(self) -> dict[str, Any]:
        """Arrays shaped as the states of all processes, as they stand in checkpoints."""
        states = self.updater.rule.states
        return self._named({n: dict.fromkeys(states, np.broadcast_to(0.0, p.shape)) for n, p in self._params.items()})

    def counts(self) -> dict[str, Any]:
        """The part of :meth:`state` that counts updates."""
        return self._named({name: {} for name in self.updater.counts})

    def _named(self, moments: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        counts = {name: self.updater.counts.get(name, 0) + 1 for name in moments}
        state = moments_to_orttrainer(self._config.name, moments, counts)
        return {n: {k: np.asarray(v) for k, v in values.items()} for n, values in state.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` gave; what is missing stays as it is."""
        shared = moments_from_orttrainer(state.get(SHARED, {}))[1]
        if shared is not None:
            self.updater.counts = dict.fromkeys(self.updater.counts, shared - 1)
        for name, values in state.items():
            if name not in self.updater.moments:
                continue
            moments, count = moments_from_orttrainer(values)
            for key, value in moments.items():
                if key in self.updater.moments[name]:
                    self.updater.moments[name][key].copy_(torch.as_tensor(value))
            if count is not None:
                self.updater.counts[name] = count - 1
        self.updater.forget_plan()


def _settings(config: _OptimizerConfig, hyper: Mapping[str, Any], *, clip: bool) -> OptimizerSettings:
    if isinstance(config, SGDConfig):
        return OptimizerSettings("SGD", config.lr)
    values: dict[str, Any] = {
        "betas": (hyper["alpha"], hyper["beta"]),
        "eps": hyper["epsilon"],
        "weight_decay": hyper["lambda"],
        "bias_correction": bool(hyper["do_bias_correction"]),
        "clip_grad_norm": hyper["max_norm_clip"] if clip and math.isfinite(hyper["max_norm_clip"]) else None,
    }
    if isinstance(config, LambConfig):
        return OptimizerSettings(
            "Lamb", config.lr, **values, ratio_min=hyper["ratio_min"], ratio_max=hyper["ratio_max"]
        )
    after = hyper["weight_decay_mode"] is AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
    return OptimizerSettings("AdamW", config.lr, **values, decay="after" if after else "before")


def as_array(tensor: Tensor) -> Any:
    """A copy of ``tensor`` for a state; of bfloat16, which NumPy does not have, in float32."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()
