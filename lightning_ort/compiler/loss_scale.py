"""The factor that keeps 16-bit gradients from vanishing, and what is known of the gradients computed with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._guards import TracingContext

__all__ = ["LossScaling", "scale_fake", "seed_of", "unscaled"]

_MOST_PENDING = 64


class LossScaling:
    """Scale of the losses of a step, which its graphs read at each run.

    A graph multiplies the gradient of its loss by :attr:`scale`, divides the gradients it gives out by it, and says
    whether all of them are finite. Those answers are collected here, by parameter, and read when an optimizer is about
    to use the gradients.

    Args:
        scale: the factor to start with.
    """

    def __init__(self, scale: float) -> None:
        self._scale = float(scale)
        self._tensors: dict[torch.device, torch.Tensor] = {}
        self._pending: list[tuple[torch.Tensor, list[int]]] = []
        self._finite: dict[int, bool] = {}

    @property
    def scale(self) -> float:
        """The present factor."""
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        if value != self._scale:
            self._scale = float(value)
            for tensor in self._tensors.values():
                tensor.fill_(self._scale)

    def tensor(self, device: torch.device) -> torch.Tensor:
        """The factor as a float32 scalar on ``device``, always in the same memory."""
        found = self._tensors.get(device)
        if found is None:
            with torch.inference_mode(False):
                found = self._tensors[device] = torch.full((), self._scale, dtype=torch.float32, device=device)
        return found

    def note(self, finite: torch.Tensor, parameters: Iterable[torch.Tensor]) -> None:
        """Take down that gradients were added to those of ``parameters``.

        Args:
            finite: bool scalar, whether all of them are finite; read later, so that no device is waited for here.
            parameters: leaves of the autograd graph that live as long as the training: they are told apart by
                address.
        """
        self._pending.append((finite, [id(p) for p in parameters]))
        if len(self._pending) > _MOST_PENDING:
            self._settle()

    def _settle(self) -> None:
        for flag, parameters in self._pending:
            finite = bool(flag)
            for key in parameters:
                self._finite[key] = finite and self._finite.get(key, True)
        self._pending.clear()

    def all_finite(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the gradients that ``parameters`` hold are all finite.

        Only those are looked at of which no graph has said that they are.
        """
        self._settle()
        result = True
        for p in parameters:
            if p.grad is None or self._finite.pop(id(p), False):
                continue
            if not bool(torch.isfinite(p.grad).all()):
                # what is kept and added to stays what it is
                self._finite[id(p)] = False
                result = False
        return result

    def forget(self) -> None:
        """Drop what was noted of the gradients seen so far."""
        self._pending.clear()
        self._finite.clear()


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


def unscaled(
    gradients: Sequence[torch.Tensor | None], scale: torch.Tensor
) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """Gradients of a scaled loss divided by its scale, but for 16-bit ones, which could vanish.

    Returns:
        the gradients, and a bool scalar that says whether all entries of them are finite. (Their sum is not where one
        of them is not. Sums beyond float32, of entries all finite, count as not finite as well.)
    """
    factor = scale.reciprocal()
    results = [g if g is None or g.dtype.itemsize < 4 else g * factor for g in gradients]
    total = torch.zeros_like(scale)
    for g in results:
        if g is not None:
            total = total + g.to(scale.dtype).sum()
    return results, total - total == 0
