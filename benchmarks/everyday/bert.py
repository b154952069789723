"""Fine-tuning of a BERT: layers as transformers writes them, batches as long as their longest text, a warm-up."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn

from benchmarks.everyday.loaders import Splits
from benchmarks.everyday.text import CLASSES, LONGEST, PADDING, VOCABULARY, Paragraphs, pad

WIDTH, LAYERS, HEADS, BATCH = 128, 2, 4, 32


class Layer(nn.Module):
    """Attention and feed-forward, each followed by its normalization."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-12), nn.LayerNorm(WIDTH, eps=1e-12)
        self.feedforward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (f(x).view(B, T, HEADS, C // HEADS).transpose(1, 2) for f in (self.query, self.key, self.value))
        dropout = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        x = self.norm1(x + self.dropout(self.output(y.transpose(1, 2).reshape(B, T, C))))
        return self.norm2(x + self.dropout(self.feedforward(x)))


class Classifier(LightningModule):
    """0.7 million parameters, of which the head begins anew."""

    def __init__(self, lr: float = 5e-4, dropout: float = 0.1, warmup_steps: int = 20) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PADDING)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH, eps=1e-12), nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(LAYERS))
        self.pooler, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.norm(self.tokens(tokens) + self.positions(positions)))
        is_text = (tokens != PADDING)[:, None, None, :]
        mask = torch.zeros(is_text.shape, dtype=x.dtype, device=x.device).masked_fill(
            ~is_text, torch.finfo(x.dtype).min
        )
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.dropout(torch.tanh(self.pooler(x[:, 0]))))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch["tokens"]), batch["labels"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        logits = self(batch["tokens"])
        self.log("val_loss", F.cross_entropy(logits, batch["labels"]))
        self.log("val_accuracy", (logits.argmax(-1) == batch["labels"]).float().mean())

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self(batch["tokens"]).softmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams.lr, fused=True)
        warmup = self.hparams.warmup_steps
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_module() -> LightningModule:
    return Classifier()


def make_data() -> LightningDataModule:
    return Splits(Paragraphs(), BATCH, pad)
