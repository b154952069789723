"""Torch optimizers to optimizer configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ort.optim.config import AdamConfig, LambConfig, SGDConfig
from lightning_ort.optim.kinds import KINDS_BY_CLASS, known_class, odd_setting, unwrapped
from lightning_ort.optim.optimizers import Lamb

__all__ = ["config_from_torch"]

_AFTER = AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
_BEFORE = AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE


def config_from_torch(optimizer: Optimizer, module: nn.Module) -> AdamConfig | LambConfig | SGDConfig:
    """The configuration that makes an ORTTrainer of ``module`` compute what ``optimizer`` computes.

    The learning rate is the base of a scheduler where there is one. How torch would execute the update (``foreach``,
    ``fused``, ``capturable``, ``differentiable``) has no influence.

    Args:
        optimizer: ``torch.optim.SGD``, ``Adam`` or ``AdamW``, or one of :mod:`lightning_ort.optim`.
        module: gives the parameters their names; those that are trained must all be in ``optimizer``.

    Raises:
        ValueError: ``optimizer`` is of another class, or has a setting without a counterpart, which is named.
    """
    optimizer = unwrapped(optimizer)
    kind = known_class(optimizer)
    if kind not in KINDS_BY_CLASS:
        known = ", ".join(_title(k) for k in KINDS_BY_CLASS)
        raise ValueError(
            f"{_title(type(optimizer))} has no counterpart among AdamConfig, LambConfig and SGDConfig. These: {known}."
        )
    if odd := odd_setting(optimizer, _PLAIN_SGD if kind is torch.optim.SGD else None):
        raise ValueError(
            f"{_title(kind)} with {odd.name}={odd.value!r} (group {odd.group}) has no counterpart among the "
            f"configurations; expected {odd.name}={odd.expected!r}."
        )
    for number, group in enumerate(optimizer.param_groups):
        if kind is torch.optim.Adam and group["weight_decay"] != 0 and not group["decoupled_weight_decay"]:
            raise ValueError(
                f"torch.optim.Adam with weight_decay={group['weight_decay']!r} (group {number}) has no counterpart: "
                "AdamConfig takes the decay from the weight, as torch.optim.AdamW does, and does not add it to the "
                "gradient."
            )
    lr = _learning_rate(optimizer)
    names = _names(optimizer, module)
    if kind is torch.optim.SGD:
        return SGDConfig(lr=lr)
    hypers = [_hyper_parameters(kind, group) for group in optimizer.param_groups]
    first, groups = hypers[0], []
    for hyper, group_names in zip(hypers, names, strict=True):
        other = {key: value for key, value in hyper.items() if value != first[key]}
        if "weight_decay_mode" in other:
            raise ValueError("groups that differ in decay_after have no counterpart: weight_decay_mode is one for all.")
        if other and group_names:
            groups.append({"params": group_names, **other})
    base = {("lambda_coef" if key == "lambda" else key): value for key, value in first.items()}
    return (LambConfig if kind is Lamb else AdamConfig)(groups, lr=lr, **base)


_PLAIN_SGD = {"momentum": 0, "weight_decay": 0, "nesterov": False}
"""SGDConfig has a learning rate and nothing else."""


def _title(kind: type) -> str:
    return f"{'torch.optim' if kind.__module__.startswith('torch.') else kind.__module__}.{kind.__name__}"


def _hyper_parameters(kind: type, group: Mapping[str, Any]) -> dict[str, Any]:
    alpha, beta = group["betas"]
    hyper = {
        "alpha": float(alpha), "beta": float(beta), "lambda": float(group["weight_decay"]),
        "epsilon": float(group["eps"]), "max_norm_clip": group.get("max_norm", math.inf),
        "do_bias_correction": group.get("bias_correction", True),
    }  # fmt: skip
    if kind is Lamb:
        return hyper | {"ratio_min": float(group["ratio_min"]), "ratio_max": float(group["ratio_max"])}
    return hyper | {"weight_decay_mode": _AFTER if group.get("decay_after") else _BEFORE}


def _learning_rate(optimizer: Optimizer) -> float:
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    if len(set(rates)) > 1:
        raise ValueError(f"groups with lr={rates} have no counterpart: a configuration has one learning rate.")
    return rates[0]


def _names(optimizer: Optimizer, module: nn.Module) -> list[list[str]]:
    """Per group the names of its parameters."""
    name_of = {id(p): name for name, p in module.named_parameters()}
    members = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    if any(i not in name_of for ids in members for i in ids):
        raise ValueError(f"the optimizer has a parameter that is none of {type(module).__name__}'s.")
    inside = {i for ids in members for i in ids}
    left: Sequence[str] = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in inside]
    if left:
        raise ValueError(
            f"{', '.join(left)} of {type(module).__name__} are not in the optimizer, but an ORTTrainer would train "
            "them. Set requires_grad=False, or convert with the submodule that the optimizer trains."
        )
    return [[name_of[i] for i in ids] for ids in members]
