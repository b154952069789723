"""Tokens as frequent as words are in texts: the n-th most frequent one occurs in proportion to 1/n."""

from __future__ import annotations

import torch

__all__ = ["VOCABULARY", "make_tokens"]

VOCABULARY = 1000


def make_tokens(batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """int64 ``[batch, length]`` below :data:`VOCABULARY`; embeddings' gradients depend on how often tokens repeat."""
    frequency = 1 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)
    return torch.multinomial(frequency, batch * length, replacement=True, generator=generator).view(batch, length)
