"""A datamodule of three sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, random_split

__all__ = ["Splits"]


class Splits(LightningDataModule):
    """Four fifths of a data set for training, the rest for validation and for prediction.

    Args:
        dataset: all of it.
        batch_size: the last batch of an epoch is smaller.
        collate: makes a batch of examples; by default torch's.
    """

    def __init__(self, dataset: Dataset[Any], batch_size: int, collate: Callable[[list[Any]], Any] | None = None):
        super().__init__()
        self._training, self._held_out = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0))
        self._options = {"batch_size": batch_size, "collate_fn": collate}

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._training, shuffle=True, **self._options)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._held_out, **self._options)

    predict_dataloader = val_dataloader
