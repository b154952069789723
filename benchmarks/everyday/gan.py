"""A DCGAN with manual optimization: two optimizers, two backward passes a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.everyday.digits import digits
from benchmarks.everyday.loaders import Splits

NOISE, WIDTH, BATCH = 32, 32, 32


class GAN(LightningModule):
    """Images of 16x16; 0.1 million parameters."""

    def __init__(self, lr: float = 2e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 2 * WIDTH, 4), nn.BatchNorm2d(2 * WIDTH), nn.ReLU(),
            nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 2, 1), nn.BatchNorm2d(WIDTH), nn.ReLU(),
            nn.ConvTranspose2d(WIDTH, 1, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, WIDTH, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, 1), nn.BatchNorm2d(2 * WIDTH), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(2 * WIDTH * 16, 1),
        )  # fmt: skip

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.generator(noise[:, :, None, None])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        (real,) = batch
        of_generator, of_discriminator = self.optimizers()
        fake = self(torch.randn(len(real), NOISE, device=self.device))

        self.toggle_optimizer(of_discriminator)
        judged, deceived = self.discriminator(real), self.discriminator(fake.detach())
        loss = F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))
        loss = loss + F.binary_cross_entropy_with_logits(deceived, torch.zeros_like(deceived))
        of_discriminator.zero_grad()
        self.manual_backward(loss)
        of_discriminator.step()
        self.untoggle_optimizer(of_discriminator)
        self.log("discriminator_loss", loss, prog_bar=True)

        self.toggle_optimizer(of_generator)
        judged = self.discriminator(fake)
        loss = F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.log("generator_loss", loss, prog_bar=True)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        judged = self.discriminator(batch[0])
        self.log("val_loss", F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged)))

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self(torch.randn(len(batch[0]), NOISE, device=self.device))

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(part.parameters(), self.hparams.lr, betas=(0.5, 0.999), fused=True)
            for part in (self.generator, self.discriminator)
        ]


def make_module() -> LightningModule:
    return GAN()


def make_data() -> LightningDataModule:
    return Splits(TensorDataset(digits(1797)), BATCH)
