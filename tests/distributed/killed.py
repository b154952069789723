"""A fit of several processes that is long enough to be killed in: ``python killed.py FOLDER TIMEOUT``.

Each process writes ``FOLDER/RANK.pid`` when it begins; the process group waits ``TIMEOUT`` seconds. There are training
steps, validations and checkpoints.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTStrategy


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_train_batch_start(self, batch, batch_idx):
        time.sleep(0.02)  # as if the data took some time: moments shall not all be of the first step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def main(folder: Path, timeout: float) -> None:
    rank, world = (int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", 0), ("WORLD_SIZE", 2)))
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    checkpoints = ModelCheckpoint(folder, every_n_train_steps=4, save_last=True, save_on_train_epoch_end=False)
    trainer = Trainer(
        accelerator="cpu", devices=world, callbacks=[checkpoints], max_steps=100, val_check_interval=10,
        strategy=ORTStrategy(print_report=False, timeout=timedelta(seconds=timeout)),
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    rows = TensorDataset(torch.randn(320, 6), torch.randint(0, 3, (320,)))
    trainer.fit(Classifier(), DataLoader(rows, 8), DataLoader(rows, 64))
    print(f"rank {rank} has finished", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
