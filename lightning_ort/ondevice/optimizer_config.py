"""Which optimizer an artifact holds."""

from __future__ import annotations

import enum
from typing import Any

import torch

from lightning_ort.optim.kinds import KINDS_BY_CLASS, kind_of, odd_setting, unwrapped
from lightning_ort.optim.settings import KINDS, OptimizerSettings
from lightning_ort.validation import shown

__all__ = ["OptimType", "OptimizerConfig", "config_of", "config_of_kind"]


class OptimType(enum.Enum):
    """Optimizers of artifacts; those of ONNX Runtime are the first two, and have the settings that they have there.

    So ``OptimType.AdamW`` is ``OptimizerConfig("AdamW", eps=1e-6, decay="after")``, as ``onnxblock.optim.AdamW()`` is.
    """

    AdamW = 1
    SGD = 2
    Adam = 3
    Lamb = 4


OptimizerConfig = OptimizerSettings
"""The settings, under the name that users of artifacts know."""

_SETTINGS: dict[str, dict[str, Any]] = {"AdamW": {"eps": 1e-6, "decay": "after"}}
"""What ONNX Runtime's ``OptimType`` means besides the defaults."""


def config_of_kind(optimizer: Any) -> OptimizerConfig:
    """The default settings of a kind, or those of a member of an ``OptimType``, ONNX Runtime's or this one.

    Raises:
        ValueError: an unknown kind.
    """
    kind: Any = optimizer if isinstance(optimizer, str) else getattr(optimizer, "name", optimizer)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"optimizer={shown(optimizer)}: expected an OptimizerConfig, or one of {', '.join(KINDS)}.")
    settings = {} if isinstance(optimizer, str) else _SETTINGS.get(kind, {})
    return OptimizerConfig(kind, **settings)  # type: ignore[arg-type]  # one of KINDS


def config_of(optimizer: torch.optim.Optimizer, *, clip_grad_norm: float | None = None) -> OptimizerConfig:
    """The settings of ``optimizer``, which must be the same for all of its parameters.

    Raises:
        ValueError: another class than torch's AdamW, Adam and SGD and this package's AdamW and Lamb, or settings that
            artifacts have not.
    """
    optimizer = unwrapped(optimizer)
    name = type(optimizer).__name__
    kind = kind_of(optimizer)
    if kind is None:
        known = ", ".join(dict.fromkeys(f"{k.__module__.split('.')[0]}'s {k.__name__}" for k in KINDS_BY_CLASS))
        raise ValueError(f"optimizer is a {name}; artifacts can hold {known}. Pass an OptimizerConfig.")
    groups = [{k: v for k, v in g.items() if k not in ("params", "initial_lr")} for g in optimizer.param_groups]
    if any(g != groups[0] for g in groups):
        raise ValueError(f"The {name} has groups with different settings; artifacts have one. Pass an OptimizerConfig.")
    group = groups[0]
    if odd := odd_setting(optimizer):
        raise ValueError(f"The {name} has {odd.name}={odd.value!r}, which artifacts have not.")
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
    return OptimizerConfig(kind, clip_grad_norm=clip_grad_norm, **values)
