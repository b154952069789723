"""Segmentation with a U-Net: which pixels of a noisy image belong to its ellipse."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.everyday.loaders import Splits

IMAGES, SIZE, CHANNELS, BATCH = 200, 48, 12, 8


class Twice(nn.Sequential):
    """Convolution, BatchNorm and ReLU, two times."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers = []
        for n in (inputs, outputs):
            layers += [nn.Conv2d(n, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        super().__init__(*layers)


class UNet(LightningModule):
    """Three levels, 0.1 million parameters."""

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        c = CHANNELS
        self.down1, self.down2, self.bottom = Twice(3, c), Twice(c, 2 * c), Twice(2 * c, 4 * c)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * c, 2 * c, 2, 2), nn.ConvTranspose2d(2 * c, c, 2, 2)
        self.join2, self.join1 = Twice(4 * c, 2 * c), Twice(2 * c, c)
        self.head = nn.Conv2d(c, 1, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        first = self.down1(images)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.bottom(F.max_pool2d(second, 2))
        x = self.join2(torch.cat([self.up2(x), second], dim=1))
        return self.head(self.join1(torch.cat([self.up1(x), first], dim=1)))

    def _loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, masks = batch
        logits = self(images)
        probability = logits.sigmoid()
        overlap = 2 * (probability * masks).sum() / (probability.sum() + masks.sum() + 1)
        return F.binary_cross_entropy_with_logits(logits, masks) + 1 - overlap

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self(batch[0]) > 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams.lr, fused=True)


def make_module() -> LightningModule:
    return UNet()


def make_data() -> LightningDataModule:
    generator = torch.Generator().manual_seed(0)
    centers = SIZE * (0.3 + 0.4 * torch.rand(IMAGES, 2, 1, 1, generator=generator))
    radii = SIZE * (0.1 + 0.2 * torch.rand(IMAGES, 2, 1, 1, generator=generator))
    places = torch.arange(float(SIZE))
    rows = (places[:, None] - centers[:, 0]) / radii[:, 0]
    columns = (places[None, :] - centers[:, 1]) / radii[:, 1]
    masks = (rows**2 + columns**2 < 1).float().unsqueeze(1)
    colours = torch.randn(IMAGES, 3, 1, 1, generator=generator)
    images = masks * colours + 0.5 * torch.randn(IMAGES, 3, SIZE, SIZE, generator=generator)
    return Splits(TensorDataset(images, masks), BATCH)
