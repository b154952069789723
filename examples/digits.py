"""Train a classifier of handwritten digits in ONNX Runtime, test it, and ship it as an ONNX model.

The 1797 images of 8 x 8 pixels come with scikit-learn. The LightningModule is an ordinary one: only the two lines
that mention ``lightning_ort`` and ``strategy="ort"`` differ from training in PyTorch.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import export_onnx  # the import registers strategy="ort"


class Digits(LightningDataModule):
    """Images scaled to [0, 1] in three stratified parts: 1077 to train, 360 to validate, 360 to test."""

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        images = images.reshape(-1, 1, 8, 8).astype(np.float32) / 16
        rest, test, rest_labels, test_labels = train_test_split(
            images, labels, test_size=360, stratify=labels, random_state=0
        )
        train, val, train_labels, val_labels = train_test_split(
            rest, rest_labels, test_size=360, stratify=rest_labels, random_state=0
        )
        self.train, self.val, self.test = (
            TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
            for x, y in ((train, train_labels), (val, val_labels), (test, test_labels))
        )

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, self.batch_size)


class DigitClassifier(LightningModule):
    """A small convolutional network."""

    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(64 * 4 * 4, 10),
        )
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(10, average="micro")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_acc", self.accuracy, prog_bar=True)

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self(images), labels)
        self.log("test_acc", self.accuracy)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--strategy", default="ort", help='"auto" trains the same network in PyTorch')
    parser.add_argument("--output", type=Path, default=Path("digits.onnx"))
    arguments = parser.parse_args()

    seed_everything(0)
    data, model = Digits(), DigitClassifier()
    trainer = Trainer(
        strategy=arguments.strategy,
        accelerator="cpu",
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
    )
    start = time.perf_counter()
    trainer.fit(model, data)
    seconds = time.perf_counter() - start
    accuracy = trainer.test(model, data, verbose=False)[0]["test_acc"]

    exported = export_onnx(model, arguments.output, data.test.tensors[0], output_names=["logits"])
    print(f"\nTrained in {seconds:.0f} s; accuracy on {len(data.test)} test images: {accuracy:.4f}")
    print(f"Wrote {exported.path}; its logits are within {exported.difference:.0e} of the module's.")


if __name__ == "__main__":
    main()
