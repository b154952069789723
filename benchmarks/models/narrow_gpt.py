"""The GPT of :mod:`.gpt`, narrow and as deep as asked for: its compile time is that of many layers, its step short."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule

from benchmarks.models.gpt import GPT
from benchmarks.models.tokens import make_tokens

WIDTH, HEADS, LENGTH, BATCH = 64, 2, 64, 4


def make_module(layers: int) -> LightningModule:
    return GPT(width=WIDTH, layers=layers, heads=HEADS)


def make_batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    text = make_tokens(BATCH, LENGTH + 1, generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
