"""A fit of one task of ``srun``: ``python slurm_worker.py FOLDER NODES DEVICES`` writes ``FOLDER/RANK.pt``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTStrategy


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen = 0.0

    def training_step(self, batch, batch_idx):
        return (self.layer(batch[0]) - 2 * batch[0]).square().mean()

    def on_train_batch_start(self, batch, batch_idx):
        self.seen += float(batch[0].sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    module = Line()
    nodes, each = map(int, sys.argv[2:])
    trainer = Trainer(
        accelerator="cpu", devices=each, num_nodes=nodes, strategy=ORTStrategy(print_report=False), max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.arange(16.0)[:, None]), 4))
    environment = trainer.strategy.cluster_environment
    found = {
        "of slurm": isinstance(environment, SLURMEnvironment),
        "rank": (trainer.global_rank, trainer.node_rank, trainer.local_rank, trainer.world_size),
        "steps": trainer.global_step,
        "seen": module.seen,
        "weights": dict(module.state_dict()),
    }
    torch.save(found, Path(sys.argv[1]) / f"{trainer.global_rank}.pt")
