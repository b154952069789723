"""Networks that the tests of on-device training share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvNet(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        # a bias before a normalization has a gradient of rounding errors only
        self.conv1, self.norm1 = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8, momentum=0.2)
        self.dropout, self.head = nn.Dropout(p), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm1(self.conv1(x))), 2)
        return self.head(self.dropout(torch.relu(self.norm2(self.conv2(x)))).mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x)).mean(1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.down, self.down_norm = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.GroupNorm(4, 8)
        self.out = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.norm(self.conv(x)))
        d = F.silu(self.down_norm(self.down(h)))
        return self.out(torch.cat([h, F.interpolate(d, scale_factor=2.0, mode="bilinear")], 1))


class ChannelsLast(nn.Module):
    """Weights and images that lie otherwise in memory; normalized over channels, averaged over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3), nn.LayerNorm(8)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 4)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(self.pool(h.relu()).flatten(1))


class InstanceNorm(nn.Module):
    """Followed by what changes its result in place, and so by strides of it."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.InstanceNorm2d(8, affine=True)
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), norm, nn.ELU(inplace=True), nn.Conv2d(8, 8, 3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).amax((2, 3)))


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 8, 2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def labels(n):
    return torch.randint(0, 4, (n,))


NETWORKS = {
    "convnet": (ConvNet, lambda n: (torch.randn(n, 1, 11, 11), labels(n)), "CrossEntropyLoss", True),
    "transformer": (Transformer, lambda n: (torch.randint(0, 20, (n, 6)), labels(n)), "CrossEntropyLoss", True),
    "channels last": (ChannelsLast, lambda n: (torch.randn(n, 1, 9, 9), labels(n)), "CrossEntropyLoss", True),
    "instance norm": (InstanceNorm, lambda n: (torch.randn(n, 1, 9, 9), labels(n)), "CrossEntropyLoss", True),
    "unet": (UNet, lambda n: (torch.randn(n, 1, 8, 8), torch.randn(n, 1, 8, 8)), "MSELoss", False),
    "lstm": (LSTM, lambda n: (torch.randn(n, 6, 5), labels(n)), "CrossEntropyLoss", False),
}
