"""A language model of two LSTM layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn

from benchmarks.models.tokens import VOCABULARY, make_tokens

WIDTH, LAYERS, LENGTH, BATCH = 256, 2, 64, 16


class LSTMLanguageModel(LightningModule):
    """1.6 million parameters, dropout 0.1."""

    logs = True
    fused: bool | None = True

    def __init__(self, lr: float = 1e-3, dropout: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.dropout(self.tokens(tokens)))
        return self.head(self.dropout(hidden))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        tokens, following = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), following.flatten())
        if self.logs:
            self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams.lr, fused=self.fused)


def make_module() -> LightningModule:
    return LSTMLanguageModel()


def make_batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    text = make_tokens(BATCH, LENGTH + 1, generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
