"""ResNet-18 (He et al. 2015) in its usual form for images of 32 x 32: a 3 x 3 stem and no pooling after it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn

CLASSES, BATCH = 10, 32


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut, which is projected where the shape changes."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or before != width:
            self.downsample = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += shortcut
        return self.relu(out)


class ResNet18(LightningModule):
    """11.2 million parameters."""

    logs = True
    fused: bool | None = True

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        blocks, before = [], 64
        for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [BasicBlock(before, width, stride), BasicBlock(width, width, 1)]
            before = width
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(512, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.blocks(self.stem(images))).flatten(1))

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
    return ResNet18()


def make_batch(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randn(BATCH, 3, 32, 32, generator=generator), torch.randint(0, CLASSES, (BATCH,), generator=generator)
