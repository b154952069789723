"""BYOL: two views of an image, an online network that predicts what its moving average sees."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.everyday.digits import SIZE, digits
from benchmarks.everyday.loaders import Splits

WIDTH, BATCH = 32, 64


def views(examples: list[tuple[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two batches of the same images, each shifted, with noise, and with some of it out of sight."""
    images = torch.stack([image for (image,) in examples])
    return _view(images), _view(images)


def _view(images: torch.Tensor) -> torch.Tensor:
    top, left = torch.randint(0, 5, (2,)).tolist()
    shifted = F.pad(images, (2, 2, 2, 2), value=-1.0)[..., top : top + SIZE, left : left + SIZE]
    return F.dropout(shifted + 0.1 * torch.randn_like(images), 0.1)


def _head(inputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64))


class BYOL(LightningModule):
    """A small convolutional encoder with a projection and a predictor."""

    def __init__(self, lr: float = 1e-3, momentum: float = 0.99) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.online = nn.Sequential(
            nn.Conv2d(1, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(WIDTH, 2 * WIDTH, 3, padding=1), nn.BatchNorm2d(2 * WIDTH), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), _head(2 * WIDTH),
        )  # fmt: skip
        self.predictor = _head(64)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.online(images)

    def _loss(self, images: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.target(other)
        return 1 - F.cosine_similarity(self.predictor(self.online(images)), wanted).mean()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        one, two = batch
        loss = self._loss(one, two) + self._loss(two, one)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # the lists of tensors that the optimizers of torch use
        own, online = list(self.target.parameters()), list(self.online.parameters())
        torch._foreach_lerp_(own, [p.detach() for p in online], 1 - self.hparams.momentum)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(*batch))

    def predict_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, self.hparams.lr, fused=True)


def make_module() -> LightningModule:
    return BYOL()


def make_data() -> LightningDataModule:
    return Splits(TensorDataset(digits(1797)), BATCH, views)
