"""Other weights in a module for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["in_dtype", "weights_from"]


@contextlib.contextmanager
def in_dtype(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """``module`` with floating-point parameters and buffers of another type; afterwards it has its own again."""
    if dtype is None:
        yield
        return
    tensors = [*module.parameters(), *module.buffers()]
    before = [(t, t.data) for t in tensors if t.is_floating_point() and t.dtype != dtype]
    try:
        for tensor, data in before:
            tensor.data = data.to(dtype)
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


@contextlib.contextmanager
def weights_from(module: nn.Module, load: Callable[[], Any] | None) -> Iterator[None]:
    """``module`` with the weights that ``load()`` puts into it; afterwards it has its own again."""
    if load is None:
        yield
        return
    before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    try:
        load()
        yield
    finally:
        with torch.no_grad():
            for name, tensor in module.state_dict().items():
                tensor.copy_(before[name])
