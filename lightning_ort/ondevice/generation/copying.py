"""A module to experiment with: its Python state is copied, its tensors are shared."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric

__all__ = ["without_side_effects"]


def without_side_effects(module: nn.Module) -> nn.Module:
    """A copy whose counters and lists are its own, which logs nothing and whose metrics compute nothing.

    A metric gives NaN, so that a loss that depends on one is found out when the graphs are checked.

    Raises:
        ValueError: the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        memo[id(tensor)] = tensor
    for part in module.modules():
        if isinstance(part, LightningModule):
            for owner in (part._trainer, part._fabric):
                if owner is not None:
                    memo[id(owner)] = None
    try:
        found = copy.deepcopy(module, memo)
    except Exception as error:
        raise ValueError(
            f"{type(module).__name__} cannot be copied ({error}), so that its steps cannot be traced without changing "
            "it. Give the network that it holds, and a loss function."
        ) from error
    for part in found.modules():
        if isinstance(part, LightningModule):
            part.__dict__.update(log=_nothing, log_dict=_nothing)
        if isinstance(part, Metric):
            part.__dict__.update(forward=_not_a_number, compute=_not_a_number, update=_nothing)
    return found


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _not_a_number(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.tensor(torch.nan)
