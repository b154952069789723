"""A tagger's reading of texts: packed sequences through a bidirectional LSTM, attention over its states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.everyday.loaders import Splits
from benchmarks.everyday.text import CLASSES, PADDING, VOCABULARY, Paragraphs, pad

WIDTH, BATCH = 64, 32


class Reader(LightningModule):
    """0.3 million parameters."""

    def __init__(self, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PADDING)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.attention, self.head = nn.Linear(2 * WIDTH, 1), nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.tokens(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        scores = self.attention(states).squeeze(-1).masked_fill(tokens == PADDING, -1e4)
        return self.head((scores.softmax(-1).unsqueeze(-1) * states).sum(1))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch["tokens"], batch["lengths"]), batch["labels"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch["tokens"], batch["lengths"]), batch["labels"]))

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self(batch["tokens"], batch["lengths"]).argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams.lr, fused=True)


def make_module() -> LightningModule:
    return Reader()


def make_data() -> LightningDataModule:
    return Splits(Paragraphs(), BATCH, pad)
