"""From Lightning to devices and back: federated averaging on handwritten digits.

A network is trained in Lightning on a fifth of scikit-learn's digits and becomes artifacts for devices, together with
the state of its optimizer. Three simulated devices go on with digits of their own, which never leave them; from time
to time their parameters are averaged. The result, moments included, goes back into the LightningModule and its
optimizer, which are trained for one more epoch. With ``--api onnxruntime`` the devices use ONNX Runtime's own training
API (onnxruntime-training 1.19), on the same files.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ondevice  # the import registers strategy="ort"

LR = 3e-3


class Classifier(LightningModule):
    """A small network with running statistics, which have to travel as well."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), LR)

    @torch.no_grad()
    def accuracy(self, data: TensorDataset) -> float:
        images, labels = data.tensors
        found = self.eval()(images).argmax(1)
        self.train()
        return float((found == labels).float().mean())


class Device:
    """One training on a device, with ``lightning_ort.ondevice`` or ``onnxruntime.training.api``."""

    def __init__(self, api: ModuleType, folder: Path, data: TensorDataset, seed: int) -> None:
        self.api, self.data, self.random = api, data, np.random.default_rng(seed)
        self.state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
        self.module = api.Module(str(folder / "training_model.onnx"), self.state, str(folder / "eval_model.onnx"))
        self.optimizer = api.Optimizer(str(folder / "optimizer_model.onnx"), self.module)
        self.optimizer.set_learning_rate(LR)

    def epoch(self) -> None:
        self.module.train()
        for images, labels in self.batches():
            self.module(images, labels)
            self.optimizer.step()
            self.module.lazy_reset_grad()

    def batches(self, size: int = 16) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        images, labels = (t.numpy() for t in self.data.tensors)
        order = self.random.permutation(len(labels))
        for start in range(0, len(order) - size + 1, size):
            chosen = order[start : start + size]
            yield images[chosen], labels[chosen]

    def parameters(self) -> np.ndarray:
        """All of them, running statistics included."""
        buffer = self.module.get_contiguous_parameters(trainable_only=False)
        return buffer.numpy().copy()

    def replace(self, parameters: np.ndarray) -> None:
        buffer: Any = onnxruntime.OrtValue.ortvalue_from_numpy(parameters)
        if self.api is not ondevice:
            buffer = buffer._ortvalue  # ONNX Runtime's own method wants what an OrtValue is made of
        self.module.copy_buffer_to_parameters(buffer, trainable_only=False)

    def save(self, path: Path) -> None:
        self.api.CheckpointState.save_checkpoint(self.state, str(path), include_optimizer_state=True)


def digits(devices: int) -> tuple[list[TensorDataset], TensorDataset]:
    """A fifth of the images for Lightning and a share for each device; and 360 to test."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    images, test, labels, test_labels = train_test_split(images, labels, test_size=360, stratify=labels, random_state=0)
    fifth = len(labels) // 5
    cuts = [0, fifth, *(fifth + (len(labels) - fifth) * (k + 1) // devices for k in range(devices))]
    parts = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    tensors = [TensorDataset(torch.from_numpy(images[p]), torch.from_numpy(labels[p])) for p in parts]
    return tensors, TensorDataset(torch.from_numpy(test), torch.from_numpy(test_labels))


def fit(model: LightningModule, data: TensorDataset, epochs: int, optimizer: Any = None) -> torch.optim.Optimizer:
    """Train in Lightning; the optimizer, which goes on from an earlier one."""
    trainer = Trainer(
        strategy="ort", accelerator="cpu", max_epochs=epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    if optimizer is not None:
        model.configure_optimizers = lambda: optimizer
    trainer.fit(model, DataLoader(data, 16, shuffle=True, drop_last=True))
    return trainer.optimizers[0]


def main(arguments: list[str] | None = None) -> tuple[float, float, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--api", choices=["lightning_ort", "onnxruntime"], default="lightning_ort")
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5, help="averages of the devices' parameters")
    parser.add_argument("--epochs", type=int, default=5, help="in Lightning, before the devices")
    options = parser.parse_args(arguments)
    api: ModuleType = ondevice
    if options.api == "onnxruntime":
        from onnxruntime.training import api

    seed_everything(0)
    (first, *shares), test = digits(options.devices)
    model = Classifier()
    optimizer = fit(model, first, options.epochs)
    before = model.accuracy(test)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ondevice.generate_artifacts(
            model, folder, inputs=list(first[:4]), flavour="ort-training",
            optimizer=ondevice.OptimizerConfig("AdamW", LR, weight_decay=0.01),
        )  # fmt: skip
        state = ondevice.CheckpointState.load_checkpoint(folder / "checkpoint")
        ondevice.copy_from_torch(state, model, optimizer)
        ondevice.CheckpointState.save_checkpoint(state, folder / "checkpoint", include_optimizer_state=True)

        devices = [Device(api, folder, share, seed) for seed, share in enumerate(shares)]
        for _ in range(options.rounds):
            for device in devices:
                device.epoch()
            average = np.mean([device.parameters() for device in devices], axis=0)
            for device in devices:
                device.replace(average)
        devices[0].save(folder / "trained")
        optimizer = torch.optim.AdamW(model.parameters(), LR)
        ondevice.copy_to_torch(folder / "trained", model, optimizer)
    after = model.accuracy(test)
    fit(model, first, 1, optimizer)
    last = model.accuracy(test)
    print(f"Accuracy on {len(test)} test images, after Lightning: {before:.4f}")
    print(f"after {options.devices} devices with {options.api}: {after:.4f}")
    print(f"after one more epoch in Lightning: {last:.4f}")
    return before, after, last


if __name__ == "__main__":
    main()
