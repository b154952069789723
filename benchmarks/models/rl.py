"""A policy network and the loss of an advantage actor."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import nn

OBSERVATIONS, ACTIONS, BATCH = 8, 4, 32


class Policy(LightningModule):
    """Policy gradient with an entropy bonus."""

    logs = True
    fused: bool | None = True

    def __init__(self, lr: float = 3e-4, entropy_weight: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(OBSERVATIONS, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, ACTIONS)
        )

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.net(observations)

    def training_step(self, batch: tuple[torch.Tensor, ...], batch_idx: int) -> torch.Tensor:
        observations, actions, advantages = batch
        log_probabilities = self(observations).log_softmax(-1)
        chosen = log_probabilities.gather(1, actions.unsqueeze(1)).squeeze(1)
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1).mean()
        loss = -(chosen * advantages).mean() - self.hparams.entropy_weight * entropy
        if self.logs:
            self.log("loss", loss, prog_bar=True)
            self.log("entropy", entropy)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams.lr, fused=self.fused)


def make_module() -> LightningModule:
    return Policy()


def make_batch(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(BATCH, OBSERVATIONS, generator=generator),
        torch.randint(0, ACTIONS, (BATCH,), generator=generator),
        torch.randn(BATCH, generator=generator),
    )
