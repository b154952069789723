"""A small convolutional classifier."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn

WIDTHS, CLASSES, BATCH = (32, 64, 128), 10, 32


class CNN(LightningModule):
    """Convolution, BatchNorm, ReLU and max-pool, three times."""

    logs = True
    fused: bool | None = True

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers: list[nn.Module] = []
        for before, width in zip((3, *WIDTHS), WIDTHS, strict=False):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTHS[-1] * 4 * 4, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).flatten(1))

    def training_step(self, batch: tuple[torch.Tensor, ...], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        if self.logs:
            self.log("train_loss", loss, prog_bar=True)
            self.log("train_acc", (logits.argmax(-1) == labels).float().mean())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams.lr, fused=self.fused)


def make_module() -> LightningModule:
    return CNN()


def make_batch(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randn(BATCH, 3, 32, 32, generator=generator), torch.randint(0, CLASSES, (BATCH,), generator=generator)
