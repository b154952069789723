"""Train a classifier of handwritten digits in a loop of one's own, in ONNX Runtime: Fabric(strategy="ort").

python examples/fabric_loop.py [--strategy auto] [--epochs 5] [--devices 2] [--checkpoint digits.ckpt]

The 1797 images of 8 x 8 pixels come with scikit-learn. The loop is Fabric's; what ``lightning_ort`` adds is an import
and the name of the strategy. A checkpoint that is there is gone on from, whichever strategy has written it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ort  # noqa: F401 - registers strategy="ort"


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Images scaled to [0, 1] in two stratified parts: 1437 to train, 360 to test."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype(np.float32) / 16
    train, test, train_labels, test_labels = train_test_split(
        images, labels, test_size=360, stratify=labels, random_state=0
    )
    return tuple(
        TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in ((train, train_labels), (test, test_labels))
    )  # type: ignore[return-value]


class Classifier(nn.Module):
    """Two convolutions, and two linear layers with dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="ort", help="or Fabric's own, such as auto")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, help="file to go on from, if it is there, and to save to")
    args = parser.parse_args()

    fabric = Fabric(accelerator="cpu", devices=args.devices, strategy=args.strategy)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    train, test = digits()
    module = Classifier()
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters(), lr=2e-3))
    loader = fabric.setup_dataloaders(DataLoader(train, 64, shuffle=True))
    test_loader = fabric.setup_dataloaders(DataLoader(test, 120))
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if args.checkpoint is not None and args.checkpoint.exists():
        fabric.load(args.checkpoint, state)

    for epoch in range(state["epoch"], args.epochs):
        began = time.perf_counter()
        model.train()
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=5.0)
            optimizer.step()
        seconds = time.perf_counter() - began

        model.eval()
        right = torch.zeros((), dtype=torch.int64)
        with torch.no_grad():
            for images, labels in test_loader:
                right += (model(images).argmax(1) == labels).sum()
        right = fabric.all_reduce(right, reduce_op="sum")
        fabric.print(f"epoch {epoch + 1}: {seconds:.1f} s, loss {loss:.3f}, {right / len(test):.1%} of the test images")
        state["epoch"] = epoch + 1
        if args.checkpoint is not None:
            fabric.save(args.checkpoint, state)
    if hasattr(fabric.strategy, "report"):
        fabric.print(fabric.strategy.report())


if __name__ == "__main__":
    main()
