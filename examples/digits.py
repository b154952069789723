"""Train a classifier of handwritten digits in PyTorch and in ONNX Runtime, test both, and ship the latter as ONNX.

The 1797 images of 8 x 8 pixels come with scikit-learn. The LightningModule is an ordinary one: what ``lightning_ort``
adds is an import, the name of the strategy, and the export.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
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


class EpochTimes(Callback):
    """Seconds of each epoch; those of the first include what is compiled for its steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds.append(time.perf_counter() - self._start)


class Training(NamedTuple):
    """What a strategy has come to, with the seconds of the whole fit and of its epochs."""

    model: DigitClassifier
    fit: float
    epochs: list[float]
    accuracy: float


def train(strategy: str, epochs: int, data: Digits) -> Training:
    """Train and test from the same seed; only the strategy differs."""
    seed_everything(0)
    model, times = DigitClassifier(), EpochTimes()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    start = time.perf_counter()
    trainer.fit(model, data)
    seconds = time.perf_counter() - start
    return Training(model, seconds, times.seconds, trainer.test(model, data, verbose=False)[0]["test_acc"])


def print_table(trainings: dict[str, Training]) -> None:
    """Seconds and accuracy, one strategy a line."""
    print(f"\n{'strategy':<9} {'fit':>7} {'first epoch':>12} {'a later one':>12} {'accuracy':>9}")
    for name, training in trainings.items():
        later = f"{statistics.median(training.epochs[1:]):10.2f} s" if training.epochs[1:] else f"{'-':>12}"
        print(f"{name:<9} {training.fit:5.1f} s {training.epochs[0]:10.2f} s {later} {training.accuracy:9.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--output", type=Path, default=Path("digits"), help="folder of the ONNX model")
    arguments = parser.parse_args()
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")

    data, trainings = Digits(), {}
    for strategy in ("auto", "ort"):
        print(f'Training {arguments.epochs} epochs with strategy="{strategy}"', flush=True)
        trainings[strategy] = train(strategy, arguments.epochs, data)

    arguments.output.mkdir(parents=True, exist_ok=True)
    exported = export_onnx(
        trainings["ort"].model, arguments.output / "model.onnx", data.test.tensors[0], output_names=["logits"]
    )
    print(f"\nWrote {exported.path}; its logits are within {exported.difference:.0e} of the module's.")
    print_table(trainings)
    print(f"\nAccuracy is that on {len(data.test)} test images; the first epoch includes compiling.")


if __name__ == "__main__":
    main()
