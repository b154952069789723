"""A classifier of flattened images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn

PIXELS, CLASSES, BATCH = 784, 10, 64


class MLP(LightningModule):
    """Two hidden layers; loss and accuracy are logged."""

    logs = True
    fused: bool | None = True

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(PIXELS, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)

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
    return MLP()


def make_batch(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.rand(BATCH, PIXELS, generator=generator), torch.randint(0, CLASSES, (BATCH,), generator=generator)
