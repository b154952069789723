"""A click predictor on a table of categorical and numeric columns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn

CARDINALITIES, NUMERIC, BATCH = (12, 7, 50, 300, 4, 1000, 24, 31), 10, 128


class TabularNet(LightningModule):
    """An embedding per categorical column, BatchNorm on the numeric ones, two hidden layers."""

    logs = True
    fused: bool | None = True

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        widths = [min(50, (n + 1) // 2) for n in CARDINALITIES]
        self.embeddings = nn.ModuleList(nn.Embedding(n, w) for n, w in zip(CARDINALITIES, widths, strict=True))
        self.normalize = nn.BatchNorm1d(NUMERIC)
        self.net = nn.Sequential(
            nn.Linear(sum(widths) + NUMERIC, 256),
            nn.ReLU(),
            nn.BatchNorm1d(256),
            nn.Dropout(0.1),
            nn.Linear(256, 128),
            nn.ReLU(),
            nn.BatchNorm1d(128),
            nn.Dropout(0.1),
            nn.Linear(128, 1),
        )

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        embedded = [embedding(categories[:, i]) for i, embedding in enumerate(self.embeddings)]
        return self.net(torch.cat([*embedded, self.normalize(numbers)], dim=1)).squeeze(1)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self(batch["categories"], batch["numbers"])
        loss = F.binary_cross_entropy_with_logits(logits, batch["clicked"])
        if self.logs:
            self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams.lr, fused=self.fused)


def make_module() -> LightningModule:
    return TabularNet()


def make_batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "categories": torch.stack([torch.randint(0, n, (BATCH,), generator=generator) for n in CARDINALITIES], dim=1),
        "numbers": torch.randn(BATCH, NUMERIC, generator=generator),
        "clicked": torch.randint(0, 2, (BATCH,), generator=generator).float(),
    }
