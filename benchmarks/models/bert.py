"""A BERT-like encoder out of torch's own layers, trained to fill in masked tokens of sentences of several lengths."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn

from benchmarks.models.tokens import VOCABULARY, make_tokens

WIDTH, LAYERS, HEADS, LENGTH, BATCH = 256, 4, 4, 128, 8
PADDING, MASK = VOCABULARY, VOCABULARY + 1
IGNORED = -100


class MaskedLM(LightningModule):
    """3.7 million parameters, dropout 0.1."""

    logs = True
    fused: bool | None = True

    def __init__(self, lr: float = 3e-4, dropout: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokens = nn.Embedding(VOCABULARY + 2, WIDTH, padding_idx=PADDING)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.encoder(x, src_key_padding_mask=tokens == PADDING))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self(batch["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)
        if self.logs:
            self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams.lr, fused=self.fused)


def make_module() -> LightningModule:
    return MaskedLM()


def make_batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
    text = make_tokens(BATCH, LENGTH, generator)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH, 1), generator=generator)
    is_text = torch.arange(LENGTH) < lengths
    is_masked = (torch.rand(BATCH, LENGTH, generator=generator) < 0.15) & is_text
    return {
        "tokens": text.masked_fill(~is_text, PADDING).masked_fill(is_masked, MASK),
        "labels": text.masked_fill(~is_masked, IGNORED),
    }
