"""What a traced graph does with the scale of its loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import TracingContext

__all__ = ["scale_fake", "seed_of", "unscaled"]


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
