"""A multilayer perceptron over measurements."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn


class Classifier(LightningModule):
    """Two classes from a row of numbers; the optimizer comes from the configuration.

    Args:
        features: numbers per row.
        width: of the hidden layers.
        depth: number of hidden layers.
        dropout: probability of a hidden unit to be left out.
    """

    def __init__(self, features: int = 30, width: int = 32, depth: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers: list[nn.Module] = []
        for size in [features] + [width] * (depth - 1):
            layers += [nn.Linear(size, width), nn.GELU(), nn.Dropout(dropout)]
        self.net = nn.Sequential(*layers, nn.Linear(width, 2))

    def forward(self, measurements: torch.Tensor) -> torch.Tensor:
        return self.net(measurements)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self(batch[0]).softmax(-1)

    def _evaluate(self, batch: list[torch.Tensor], name: str) -> None:
        x, y = batch
        logits = self(x)
        # sync_dist: of all processes, where there are several
        self.log(f"{name}_loss", F.cross_entropy(logits, y), sync_dist=True)
        self.log(f"{name}_accuracy", (logits.argmax(-1) == y).float().mean(), sync_dist=True)
