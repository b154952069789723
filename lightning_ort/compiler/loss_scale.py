"""The factor that keeps 16-bit gradients from vanishing, and what is known of the gradients computed with it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._guards import TracingContext

__all__ = ["LossScaling", "all_finite", "scale_fake", "seed_of", "unscaled"]


class LossScaling:
    """Scale of the losses of a step, which its graphs read at each run.

    A graph multiplies the gradient of its loss by :attr:`in_graphs`, and divides the gradients it gives out by it.

    Args:
        scale: the factor to start with.

    Attributes:
        by_hand: what gradients are asked for in the backward that runs is multiplied by :attr:`scale` already.
    """

    def __init__(self, scale: float) -> None:
        self._scale, self._batches = float(scale), 1
        self.by_hand = False
        self._tensors: dict[torch.device, torch.Tensor] = {}

    @property
    def scale(self) -> float:
        """The present factor of what gradients are asked for: the loss, divided by :attr:`batches`."""
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        if value != self._scale:
            self._scale = float(value)
            self._fill()

    @property
    def batches(self) -> int:
        """By how many the losses are divided after their graphs, which average gradients over so many batches."""
        return self._batches

    @batches.setter
    def batches(self, value: int) -> None:
        if value != self._batches:
            self._batches = value
            self._fill()

    @property
    def in_graphs(self) -> float:
        """The factor of losses that are not divided yet, with which eager's 16-bit gradients are as large."""
        return self._scale / self._batches

    def tensor(self, device: torch.device) -> torch.Tensor:
        """:attr:`in_graphs` as a float32 scalar on ``device``, always in the same memory."""
        found = self._tensors.get(device)
        if found is None:
            with torch.inference_mode(False):
                found = self._tensors[device] = torch.full((), self.in_graphs, dtype=torch.float32, device=device)
        return found

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether the gradient of a scaled loss of ``dtype``, which is the scale, is finite in that type."""
        return self._scale <= torch.finfo(dtype).max

    @contextlib.contextmanager
    def multiplied(self) -> Iterator[None]:
        """A backward of what has been multiplied by :attr:`scale`."""
        self.by_hand = True
        try:
            yield
        finally:
            self.by_hand = False

    def _fill(self) -> None:
        for tensor in self._tensors.values():
            tensor.fill_(self.in_graphs)


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all entries of floating-point ``tensors`` are, in one pass over those of one type."""
    dense = [x.coalesce().values() if x.is_sparse else x for x in tensors]
    filled = [x for x in dense if x.numel()]
    return all(bool(norm.isfinite()) for norm in (torch._foreach_norm(filled, math.inf) if filled else ()))


def scale_fake(fakes: Sequence[Any]) -> torch.Tensor:
    """A fake of the scale, a float32 scalar on the device of ``fakes``."""
    mode = TracingContext.get().fake_mode
    assert mode is not None
    devices = [x.device for x in fakes if isinstance(x, torch.Tensor)]
    device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
    with mode:
        return torch.empty((), dtype=torch.float32, device=device)


def seed_of(loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The gradient of ``loss * scale`` by ``loss``, of the type and shape of the latter."""
    return scale.to(loss.dtype).reshape(loss.shape)


def unscaled(gradients: Sequence[torch.Tensor | None], scale: torch.Tensor) -> list[torch.Tensor | None]:
    """Gradients of a scaled loss divided by its scale, but for 16-bit ones, which could vanish."""
    factor = scale.reciprocal()
    return [g if g is None or g.dtype.itemsize < 4 else g * factor for g in gradients]
