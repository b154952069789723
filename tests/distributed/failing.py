"""A fit of several processes of which one fails: ``python failing.py HOW RANK STEP FOLDER [START]``.

HOW is "kill", "exit", "leave" (by SystemExit), "interrupt", "raise", "gloo" (an error with words that errors of
collectives have, too), or "late" (it is killed, and the last process comes to that step when the first one has found
that out).
START is how the Trainer starts processes, if those that run the script are not all.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTStrategy

how, rank, step, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == step and self.global_rank == rank and not (folder / "done").exists():
            (folder / "done").touch()
            if how == "exit":
                os._exit(3)
            if how == "leave":
                sys.exit(3)
            if how == "interrupt":
                signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts in the background ignores it
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
            if how in ("kill", "late"):
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "gloo":
                raise RuntimeError("my own words about gloo, NCCL and what is closed by peer")
            raise ValueError("row 7 of the data is empty")
        if how == "late" and self.global_step == step and self.global_rank == self.trainer.world_size - 1:
            time.sleep(9)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    if (folder / "done").exists() and os.environ.get("RANK") == "1":
        time.sleep(2)  # started again: rank 0 meets nobody but what has ended
    warnings.simplefilter("ignore")
    checkpoints = ModelCheckpoint(folder, every_n_train_steps=4, save_last=True, save_on_train_epoch_end=False)
    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 2)), callbacks=[checkpoints],
        strategy=ORTStrategy(print_report=False, start_method=sys.argv[5] if len(sys.argv) > 5 else None),
        max_steps=20, logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    rows = TensorDataset(torch.randn(320, 6), torch.randint(0, 3, (320,)))
    trainer.fit(Classifier(), DataLoader(rows, 8), ckpt_path="last")
    if trainer.is_global_zero:
        print("finished at step", trainer.global_step)
