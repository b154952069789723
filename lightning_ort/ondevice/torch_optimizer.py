"""A torch optimizer, with what it has learned so far, as the optimizer of artifacts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from lightning_ort.ondevice.optimizers import OptimizerConfig
from lightning_ort.ondevice.state import OptimizerState
from lightning_ort.optim import AdamW, Lamb

__all__ = ["config_of", "state_of"]

_STATES = {"moment_1": "exp_avg", "moment_2": "exp_avg_sq", "momentum": "momentum_buffer"}
_REFUSED = {"amsgrad": False, "maximize": False, "dampening": 0}


def config_of(optimizer: torch.optim.Optimizer, *, clip_grad_norm: float | None = None) -> OptimizerConfig:
    """The settings of ``optimizer``, which must be the same for all of its parameters.

    Raises:
        ValueError: another class than torch's AdamW, Adam and SGD and this package's AdamW and Lamb, or settings that
            artifacts have not.
    """
    if isinstance(optimizer, LightningOptimizer):
        optimizer = optimizer.optimizer
    name = type(optimizer).__name__
    kinds: dict[type, str] = {
        torch.optim.AdamW: "AdamW", torch.optim.Adam: "Adam", torch.optim.SGD: "SGD", AdamW: "AdamW", Lamb: "Lamb",
    }  # fmt: skip
    kind = kinds.get(type(optimizer))
    if kind is None:
        known = ", ".join(dict.fromkeys(f"{k.__module__.split('.')[0]}'s {k.__name__}" for k in kinds))
        raise ValueError(f"optimizer is a {name}; artifacts can hold {known}. Pass an OptimizerConfig.")
    groups = [{k: v for k, v in g.items() if k not in ("params", "initial_lr")} for g in optimizer.param_groups]
    if any(g != groups[0] for g in groups):
        raise ValueError(f"The {name} has groups with different settings; artifacts have one. Pass an OptimizerConfig.")
    group = groups[0]
    for setting, default in _REFUSED.items():
        if group.get(setting, default) != default:
            raise ValueError(f"The {name} has {setting}={group[setting]!r}, which artifacts have not.")
    if kind == "Adam" and group.get("decoupled_weight_decay"):
        kind = "AdamW"
    values: dict[str, Any] = {"lr": float(group["lr"]), "weight_decay": float(group["weight_decay"])}
    if kind == "SGD":
        values |= {"momentum": float(group["momentum"]), "nesterov": bool(group["nesterov"])}
    else:
        values |= {"betas": tuple(float(b) for b in group["betas"]), "eps": float(group["eps"])}
        values["bias_correction"] = bool(group.get("bias_correction", True))
    if group.get("decay_after"):
        values["decay"] = "after"
    values |= {k: float(group[k]) for k in ("ratio_min", "ratio_max") if k in group}
    limit = float(group.get("max_norm", torch.inf))
    if limit != torch.inf:
        clip_grad_norm = limit if clip_grad_norm is None else min(limit, clip_grad_norm)
    return OptimizerConfig(kind, clip_grad_norm=clip_grad_norm, **values)  # type: ignore[arg-type]


def state_of(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, trained: Mapping[str, nn.Parameter]
) -> OptimizerState:
    """Moments and number of updates.

    Raises:
        ValueError: ``optimizer`` lacks a parameter, or its parameters have had different numbers of updates.
    """
    if isinstance(optimizer, LightningOptimizer):
        optimizer = optimizer.optimizer
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    missing = [n for n, p in trained.items() if id(p) not in held]
    if missing:
        raise ValueError(f"The optimizer does not hold {', '.join(missing)}; name what is trained by requires_grad.")
    state = config.fresh_state({n: p.detach().cpu() for n, p in trained.items()})
    counts = set()
    for name, parameter in trained.items():
        found: Mapping[str, Any] = optimizer.state.get(parameter, {})
        # SGD counts nothing; its updates do not depend on their number
        counts.add(int(found.get("step", 0)))
        for own, tensor in state.moments[name].items():
            value = found.get(_STATES[own])
            if isinstance(value, Tensor):
                tensor.copy_(value)
    if len(counts) > 1:
        raise ValueError(
            f"The parameters have had different numbers of updates ({sorted(counts)}); expected one number."
        )
    state.step = max(counts, default=0)
    return state
