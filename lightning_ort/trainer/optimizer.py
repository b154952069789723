"""The optimizer of a trainer: its states, and the update graph they go through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ort.optim.config import AdamConfig, LambConfig, SGDConfig, _OptimizerConfig
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.updates import SGD, Adam, FusedAdam, Lamb, Rule, Update

__all__ = ["Optimizer"]


class Optimizer:
    """Updates named parameters by their ``grad``.

    Args:
        config: which optimizer.
        params: name to parameter, those that are trained.
        known: names of all weights of the model.
        runtime: how sessions are made.
        clip: clip Adam's and LAMB's gradients to ``max_norm_clip``.
        guard: skip updates whose gradients are not finite.

    Raises:
        ValueError: a group names a weight that does not exist, or the groups differ in ``weight_decay_mode``.

    Attributes:
        moments: parameter name to its moments, shaped like the parameter.
        counts: parameter name to the number of its next update, from 1.
        rule: what an update computes.
        clip: whether it clips.
        guard: whether it skips gradients that are not finite.
    """

    def __init__(
        self,
        config: _OptimizerConfig,
        params: Mapping[str, nn.Parameter],
        known: Mapping[str, Any],
        runtime: RuntimeConfig,
        *,
        clip: bool,
        guard: bool,
    ) -> None:
        if not isinstance(config, (AdamConfig, LambConfig, SGDConfig)):
            raise ValueError(f"{type(config).__name__} is none of AdamConfig, LambConfig and SGDConfig.")
        for group in config.params:
            missing = [name for name in group["params"] if name not in known]
            if missing:
                raise ValueError(
                    f"{missing} in a group of the optimizer are no weights of the model. Its weights are "
                    f"{', '.join(known)}."
                )
        self._config, self._params, self._runtime = config, dict(params), runtime
        self.clip, self.guard = clip and not isinstance(config, SGDConfig), guard
        self._hyper = {name: config.hyper_parameters(name) for name in params}
        self.rule = self._choose_rule()
        self.moments = {
            name: tuple(torch.zeros(p.shape, dtype=p.dtype, device=p.device) for _ in self.rule.states)
            for name, p in params.items()
        }
        self.counts = dict.fromkeys(params, 1)
        self._update: Update | FusedAdam | None = None
        self._updated: list[str] = []
        self._groups: list[str] = []

    def _choose_rule(self) -> Rule:
        if isinstance(self._config, SGDConfig):
            return SGD()
        if isinstance(self._config, LambConfig):
            return Lamb()
        modes = {hyper["weight_decay_mode"] for hyper in self._hyper.values()}
        if len(modes) > 1:
            raise ValueError("'weight_decay_mode' is the same for all weights; groups cannot differ in it.")
        if all(hyper["lambda"] == 0 for hyper in self._hyper.values()):
            # the two modes differ in their epsilon, which is a coefficient
            return Adam("none")
        return Adam("after" if AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE in modes else "before")

    def forget_plan(self) -> None:
        """Call when :attr:`counts` have been changed: parameters of one group share theirs."""
        self._update = None

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
        """One update of all parameters that have a gradient.

        Args:
            lr: learning rate.
            scale: what the gradients are multiplied with.

        Returns:
            Whether it was made: with ``guard``, gradients that are not finite change nothing.
        """
        params = {name: p for name, p in self._params.items() if p.grad is not None}
        if not params:
            return True
        if self._update is None or self._updated != list(params):
            self._plan(params)
        assert self._update is not None
        for group, name in enumerate(self._groups):
            self._update.set_coefficients(group, self._numbers(name, lr))
        limits = [self._hyper[name]["max_norm_clip"] for name in self._groups] if self.clip else None
        gradients = [p.grad for p in params.values() if p.grad is not None]
        finite = self._update.run(gradients, scale=scale, limits=limits)
        if finite:
            for name in params:
                self.counts[name] += 1
        return finite

    def _plan(self, params: Mapping[str, nn.Parameter]) -> None:
        """Make the update."""
        groups = self.groups_of(params)
        self._groups = [list(params)[groups.index(g)] for g in range(max(groups) + 1)]
        weights, states = list(params.values()), [self.moments[name] for name in params]
        if FusedAdam.can_do(self.rule, weights, self._runtime):
            self._update = FusedAdam(weights, states, groups, clip=self.clip, guard=self.guard)
        else:
            self._update = Update(self.rule, weights, states, groups, self._runtime, clip=self.clip, guard=self.guard)
        self._updated = list(params)

    def groups_of(self, names: Iterable[str]) -> list[int]:
        """Per parameter the number of its group: parameters with equal hyper-parameters, type and count."""
        numbers: dict[Any, int] = {}
        keys = [(tuple(self._hyper[n].items()), self._params[n].dtype, self.counts[n]) for n in names]
        return [numbers.setdefault(key, len(numbers)) for key in keys]

    def _numbers(self, name: str, lr: float) -> tuple[float, ...]:
        if isinstance(self._config, SGDConfig):
            return (lr,)
        hyper = self._hyper[name]
        settings, count = (hyper["alpha"], hyper["beta"], hyper["epsilon"], hyper["lambda"]), self.counts[name]
        corrected = hyper["do_bias_correction"]
        if isinstance(self._config, LambConfig):
            limits = {"ratio_min": hyper["ratio_min"], "ratio_max": hyper["ratio_max"]}
            return Lamb.numbers(lr, *settings, count, bias_correction=corrected, **limits)
        before = hyper["weight_decay_mode"] is AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE
        if isinstance(self._update, FusedAdam):
            return FusedAdam.formula(*settings, bias_correction=corrected, scaled_epsilon=before)(lr, count)
        return Adam.numbers(lr, *settings, count, bias_correction=corrected, scaled_epsilon=before)

    def state(self) -> dict[str, Any]:
        """Copies of the states, as they stand in checkpoints."""
        state: dict[str, Any] = {}
        if isinstance(self._config, SGDConfig):
            return state
        for name, (first, second) in self.moments.items():
            state[name] = {"Moment_1": _array(first), "Moment_2": _array(second)}
            if isinstance(self._config, AdamConfig):
                state[name]["Update_Count"] = torch.tensor([self.counts[name]]).numpy()
        if isinstance(self._config, LambConfig):
            state["shared_optimizer_state"] = {"Step": torch.tensor([max(self.counts.values(), default=1)]).numpy()}
        return state

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` gave; what is missing stays as it is."""
        shared = state.get("shared_optimizer_state", {})
        for key in ("Step", "step"):
            if key in shared:
                self.counts = dict.fromkeys(self.counts, int(shared[key].reshape(-1)[0]))
        for name, values in state.items():
            if name not in self.moments:
                continue
            for key, tensor in zip(("Moment_1", "Moment_2"), self.moments[name], strict=False):
                if key in values:
                    tensor.copy_(torch.as_tensor(values[key]))
            if "Update_Count" in values:
                self.counts[name] = int(values["Update_Count"].reshape(-1)[0])
        self.forget_plan()


def _array(tensor: Tensor) -> Any:
    return tensor.detach().cpu().numpy().copy()
