"""The breast cancer data set of scikit-learn: 569 tumours, 30 measurements each, benign or malignant."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, TensorDataset


class Tumours(LightningDataModule):
    """Standardized measurements in three stratified parts: 341 to train, 114 to validate, 114 to test.

    Args:
        batch_size: rows per batch.
        seed: of the split.
    """

    def __init__(self, batch_size: int = 32, seed: int = 0) -> None:
        super().__init__()
        self.batch_size, self.seed = batch_size, seed

    def setup(self, stage: str) -> None:
        x, y = load_breast_cancer(return_X_y=True)
        x, test, y, test_labels = train_test_split(x, y, test_size=114, stratify=y, random_state=self.seed)
        train, val, labels, val_labels = train_test_split(x, y, test_size=114, stratify=y, random_state=self.seed)
        scaler = StandardScaler().fit(train)
        self.parts = {
            name: TensorDataset(torch.from_numpy(scaler.transform(rows)).float(), torch.from_numpy(targets))
            for name, rows, targets in (
                ("train", train, labels),
                ("val", val, val_labels),
                ("test", test, test_labels),
            )
        }

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.parts["train"], batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.parts["val"], batch_size=len(self.parts["val"]))

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.parts["test"], batch_size=len(self.parts["test"]))

    def predict_dataloader(self) -> DataLoader:
        return self.test_dataloader()
