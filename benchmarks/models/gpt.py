"""A GPT-2 in small: pre-norm blocks, learned positions, dropout, tied embedding and head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn

from benchmarks.models.tokens import VOCABULARY, make_tokens

WIDTH, LAYERS, HEADS, LENGTH, BATCH = 256, 4, 4, 128, 8


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.residual_dropout = nn.Dropout(dropout)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in self.qkv(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.residual_dropout(self.project(y.transpose(1, 2).reshape(B, T, C)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads, dropout)
        self.feedforward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feedforward(self.norm2(x))


class GPT(LightningModule):
    """3.4 million parameters."""

    logs = True
    fused: bool | None = True

    def __init__(
        self, lr: float = 3e-4, dropout: float = 0.1, width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._initialize)
        self.head.weight = self.tokens.weight

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        tokens, following = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), following.flatten())
        if self.logs:
            self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams.lr, betas=(0.9, 0.95), fused=self.fused)


def make_module() -> LightningModule:
    return GPT()


def make_batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    text = make_tokens(BATCH, LENGTH + 1, generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
