"""The benchmarks' table of clicks, learnt with validation and early stopping."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import TensorDataset

from benchmarks.everyday.loaders import Splits
from benchmarks.models.tabular import CARDINALITIES, NUMERIC, TabularNet

ROWS, BATCH = 30_000, 128


class Clicks(TabularNet):
    """The same network for batches of a loader."""

    def _loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        categories, numbers, clicked = batch
        return F.binary_cross_entropy_with_logits(self(categories, numbers), clicked)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self(*batch[:2]).sigmoid()


def make_module() -> LightningModule:
    return Clicks()


def make_data() -> LightningDataModule:
    generator = torch.Generator().manual_seed(0)
    categories = torch.stack([torch.randint(0, n, (ROWS,), generator=generator) for n in CARDINALITIES], dim=1)
    numbers = torch.randn(ROWS, NUMERIC, generator=generator)
    wishes = numbers[:, :3].sum(1) + (categories[:, 0] % 3 - 1) * 2
    clicked = (wishes + torch.randn(ROWS, generator=generator) > 0).float()
    return Splits(TensorDataset(categories, numbers, clicked), BATCH)


def make_callbacks() -> list[Callback]:
    # it watches, and does not end the fit: all strategies are to train for as many epochs
    return [EarlyStopping("val_loss", patience=10_000)]
