"""Logged results that stay where they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# Private, for want of a public way: Lightning makes its results itself, and only their class can be reached.
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric

__all__ = ["results_stay"]


@contextlib.contextmanager
def results_stay() -> Iterator[None]:
    """Meanwhile ``self.log`` moves no result to the device that it is on.

    Lightning moves a result to the device of each new value, and copies all that belongs to the result in doing so,
    its description included. In a small step that takes longer than the forward and the backward pass.
    """
    move = _ResultMetric.to

    def to(self: _ResultMetric, *args: Any, **kwargs: Any) -> _ResultMetric:
        if len(args) == 1 and not kwargs and self.is_tensor and _is_on(self, args[0]):
            return self
        return move(self, *args, **kwargs)

    _ResultMetric.to = to  # type: ignore[method-assign]
    try:
        yield
    finally:
        _ResultMetric.to = move  # type: ignore[method-assign]


def _is_on(result: _ResultMetric, device: Any) -> bool:
    """Whether the states of ``result``, and what they are reset to, are on ``device``."""
    return all(
        getattr(result, name).device == device == default.device
        for name, default in result._defaults.items()
        if isinstance(default, torch.Tensor)
    )
