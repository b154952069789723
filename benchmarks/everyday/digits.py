"""scikit-learn's 1797 digits, larger."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

__all__ = ["SIZE", "digits"]

SIZE = 16


def digits(count: int) -> torch.Tensor:
    """float32 ``[count, 1, SIZE, SIZE]`` from -1 to 1."""
    images = torch.from_numpy(load_digits().images[:count]).float().unsqueeze(1) / 8 - 1
    return F.interpolate(images, size=(SIZE, SIZE), mode="bilinear", align_corners=False)
