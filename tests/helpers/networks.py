"""Three kinds of networks, small: an MLP, a convolutional network and a GPT."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WORDS, LENGTH = 24, 8


class _Classifies(LightningModule):
    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        loss = F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))
        self.log("loss", loss)
        return loss

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


class MLP(_Classifies):
    """Three linear layers on 48 features."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x):
        return self.net(x)


class ConvNet(_Classifies):
    """Two convolutions with pooling on images of 8x8."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 8), (8, 16)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.features, self.head = nn.Sequential(*layers), nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


class Block(nn.Module):
    """A layer of causal attention and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2)) / (d // self.heads) ** 0.5
        past = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~past, float("-inf")).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class GPT(_Classifies):
    """Two blocks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Parameter(torch.randn(1, LENGTH, width) * 0.02)
        self.blocks, self.norm = nn.Sequential(*[Block(width, 2) for _ in range(2)]), nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.words(x) + self.places)))


def examples(network: type, n: int = 128, batch_size: int = 16) -> DataLoader:
    """Inputs for ``network`` with labels that it can learn."""
    g = torch.Generator().manual_seed(0)
    if network is GPT:
        x = torch.randint(0, WORDS, (n, LENGTH), generator=g)
        return DataLoader(TensorDataset(x, (x * 3 + 1) % WORDS), batch_size=batch_size // 2)
    shape = (48,) if network is MLP else (3, 8, 8)
    x = torch.randn(n, *shape, generator=g)
    teacher = torch.randn(x[0].numel(), 10, generator=g)
    return DataLoader(TensorDataset(x, (x.flatten(1) @ teacher).argmax(-1)), batch_size=batch_size)
