"""Small random networks with losses and data, each determined by its seed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Problem"]

_ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.ReLU, nn.ReLU, nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Hardswish,
    nn.Mish, nn.PReLU, nn.ReLU6, nn.Softsign,
]  # fmt: skip
_SCORES = 5


class Problem:
    """A network, a batch and a loss, on ``device``.

    Attributes:
        module: the network.
        batch: its input and the target.
        half: whether it is computed under ``torch.autocast`` to bfloat16.
        description: of the network, in words.
    """

    def __init__(self, seed: int, device: str = "cpu") -> None:
        torch.manual_seed(seed)
        self._draw = random.Random(seed)
        family = self._draw.choice([_images, _images, _unet, _signals, _rows, _attention, _recurrent])
        self.module, x = family(self._draw)
        with torch.no_grad():
            scores = self.module(x)
        self.module.zero_grad()
        self._loss, target = self._draw.choice(_LOSSES)(self._draw, scores)
        self.module.to(device)
        self.batch = (x.to(device), target.to(device))
        self.half = self._draw.random() < 0.15
        self._seed = seed
        self.description = f"seed {seed}{' (bfloat16)' if self.half else ''}: {self._loss.__name__} of {self.module}"

    def step(self, x: Tensor, target: Any) -> Tensor:
        """The loss of a batch."""
        context = torch.autocast(x.device.type, dtype=torch.bfloat16) if self.half else contextlib.nullcontext()
        with context:
            scores = self.module(x)
        return self._loss(scores.float(), target)

    def draw_again(self, number: int) -> None:
        """Move all weights and take another batch, of the same sizes."""
        torch.manual_seed(1000 * self._seed + number)
        with torch.no_grad():
            for p in self.module.parameters():
                p.add_(torch.randn_like(p) * 0.3 * p.abs().mean()).grad = None
        x, target = self.batch
        rows = torch.randperm(len(target))
        self.batch = (torch.randn_like(x), target[rows])


class _Skip(nn.Module):
    """A network beside its input; ``join`` says how both become one."""

    def __init__(self, inner: nn.Module, join: str) -> None:
        super().__init__()
        self.inner, self.join = inner, join

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.join == "sum":
            return x + y
        return torch.cat([x, y], 1) if self.join == "cat" else x * torch.sigmoid(y)


class _Level(nn.Module):
    """One level of a U-Net."""

    def __init__(self, down: nn.Module, below: nn.Module, up: nn.Module, join: nn.Module) -> None:
        super().__init__()
        self.down, self.below, self.up, self.join = down, below, up, join

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        return self.join(torch.cat([x, self.up(self.below(x))], 1))


class _Last(nn.Module):
    """The outputs of a recurrent network, or the last of them."""

    def __init__(self, recurrent: nn.Module, last: bool) -> None:
        super().__init__()
        self.recurrent, self.last = recurrent, last

    def forward(self, x: Tensor) -> Tensor:
        y = self.recurrent(x)[0]
        return y[:, -1] if self.last else y.mean(1)


class _SelfAttention(nn.Module):
    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.qkv, self.causal = nn.Linear(width, 3 * width), causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def _norm(draw: random.Random, channels: int, dims: int) -> nn.Module:
    batch: Any = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[dims]
    instance: Any = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d}[dims]
    return draw.choice([
        lambda: batch(channels), lambda: batch(channels), lambda: nn.GroupNorm(2, channels),
        lambda: instance(channels, affine=True), nn.Identity,
    ])()  # fmt: skip


def _activation(draw: random.Random) -> nn.Module:
    return draw.choice(_ACTIVATIONS)()


def _block(draw: random.Random, dims: int, inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    conv: Any = {1: nn.Conv1d, 2: nn.Conv2d}[dims]
    groups = draw.choice([1, 1, 1, 2]) if inputs % 2 == outputs % 2 == 0 else 1
    layers = [
        conv(inputs, outputs, 3, stride, 1, groups=groups, bias=draw.random() < 0.7),
        _norm(draw, outputs, dims),
        _activation(draw),
    ]
    if draw.random() < 0.2:
        layers = [_norm(draw, inputs, dims) if inputs % 2 == 0 else nn.Identity(), _activation(draw), layers[0]]
    return nn.Sequential(*layers)


def _convolutions(draw: random.Random, dims: int, channels: int, width: int) -> nn.Module:
    layers: list[nn.Module] = [_block(draw, dims, channels, width)]
    pools: Any = {
        1: [nn.MaxPool1d(2), nn.AvgPool1d(2), nn.MaxPool1d(3, 2, 1)],
        2: [nn.MaxPool2d(2), nn.AvgPool2d(2), nn.MaxPool2d(3, 2, 1)],
    }[dims]
    for _ in range(draw.randint(1, 4)):
        inner = _block(draw, dims, width, width)
        layers.append(_Skip(inner, draw.choice(["sum", "gate"])) if draw.random() < 0.5 else inner)
    layers.append(draw.choice(pools))
    wider = width * draw.choice([1, 2])
    layers += [_block(draw, dims, width, wider), draw.choice([nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d])(1)
               if dims == 1 else draw.choice([nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d])(1)]  # fmt: skip
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(wider, _SCORES))


def _images(draw: random.Random) -> tuple[nn.Module, Tensor]:
    x = torch.randn(draw.choice([2, 4, 8]), 3, 16, 16)
    return _convolutions(draw, 2, 3, draw.choice([4, 8, 16])), x


def _signals(draw: random.Random) -> tuple[nn.Module, Tensor]:
    return _convolutions(draw, 1, 2, draw.choice([4, 8])), torch.randn(draw.choice([3, 8]), 2, 32)


def _unet(draw: random.Random) -> tuple[nn.Module, Tensor]:
    activation = draw.choice([nn.ReLU, nn.ReLU, nn.SiLU, nn.LeakyReLU])

    def double(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), activation(),
            nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), activation(),
        )  # fmt: skip

    def level(depth: int, inputs: int, width: int) -> nn.Module:
        if depth == 0:
            return double(inputs, width)
        up: nn.Module = nn.ConvTranspose2d(2 * width, width, 2, 2)
        if draw.random() < 0.3:
            up = nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(2 * width, width, 1))
        below = nn.Sequential(nn.MaxPool2d(2), level(depth - 1, width, 2 * width))
        return _Level(double(inputs, width), below, up, double(2 * width, width))

    width = draw.choice([4, 8])
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()) if draw.random() < 0.5 else nn.Flatten(2)
    net = nn.Sequential(level(draw.choice([2, 3]), 1, width), nn.Conv2d(width, _SCORES, 1), head)
    if isinstance(head, nn.Flatten):
        net.append(_Pixels())
    return net, torch.randn(2, 1, 32, 32)


class _Pixels(nn.Module):
    """Scores of each pixel as rows of their own."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1)


def _rows(draw: random.Random) -> tuple[nn.Module, Tensor]:
    width = draw.choice([8, 16, 64])
    layers: list[nn.Module] = [nn.Linear(10, width)]
    for _ in range(draw.randint(1, 5)):
        norm = draw.choice([nn.BatchNorm1d, nn.LayerNorm, lambda n: nn.Identity()])(width)
        inner = nn.Sequential(nn.Linear(width, width), norm, _activation(draw))
        layers.append(_Skip(inner, "sum") if draw.random() < 0.4 else inner)
    return nn.Sequential(*layers, nn.Linear(width, _SCORES)), torch.randn(draw.choice([4, 32]), 10)


def _attention(draw: random.Random) -> tuple[nn.Module, Tensor]:
    width, layers = draw.choice([8, 16]), []
    for _ in range(draw.randint(1, 3)):
        mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), _activation(draw), nn.Linear(2 * width, width)
        )
        attention = nn.Sequential(nn.LayerNorm(width), _SelfAttention(width, draw.random() < 0.5))
        layers += [_Skip(attention, "sum"), _Skip(mlp, "sum")]
    network = nn.Sequential(nn.Linear(6, width), *layers, nn.LayerNorm(width), _Mean(), nn.Linear(width, _SCORES))
    return network, torch.randn(draw.choice([2, 4]), 10, 6)


def _recurrent(draw: random.Random) -> tuple[nn.Module, Tensor]:
    width, kind = draw.choice([6, 12]), draw.choice([nn.LSTM, nn.GRU, nn.RNN])
    bidirectional = draw.random() < 0.3
    recurrent = kind(5, width, batch_first=True, bidirectional=bidirectional)
    outputs = width * (1 + bidirectional)
    head = draw.choice([nn.Identity(), nn.LayerNorm(outputs), nn.Sequential(nn.Linear(outputs, outputs), nn.ReLU())])
    return nn.Sequential(_Last(recurrent, draw.random() < 0.5), head, nn.Linear(outputs, _SCORES)), torch.randn(4, 6, 5)


def _cross_entropy(draw: random.Random, scores: Tensor) -> tuple[Any, Any]:
    smoothing = draw.choice([0.0, 0.1])

    def cross_entropy(scores: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(scores, target, label_smoothing=smoothing)

    return cross_entropy, torch.randint(_SCORES, scores.shape[:1])


def _squares(draw: random.Random, scores: Tensor) -> tuple[Any, Any]:
    return draw.choice([F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss]), torch.randn_like(scores)


def _binary(draw: random.Random, scores: Tensor) -> tuple[Any, Any]:
    return F.binary_cross_entropy_with_logits, torch.randint(2, scores.shape).float()


def _divergence(draw: random.Random, scores: Tensor) -> tuple[Any, Any]:
    def divergence(scores: Tensor, target: Tensor) -> Tensor:
        return F.kl_div(scores.log_softmax(-1), target, reduction="batchmean")

    return divergence, torch.randn_like(scores).softmax(-1)


def _cosine(draw: random.Random, scores: Tensor) -> tuple[Any, Any]:
    signs = torch.randint(2, scores.shape[:1]) * 2 - 1

    def cosine(scores: Tensor, target: Tensor) -> Tensor:
        return F.cosine_embedding_loss(scores, target, signs.to(scores.device), margin=0.1)

    return cosine, torch.randn_like(scores)


def _margin(draw: random.Random, scores: Tensor) -> tuple[Any, Any]:
    return F.multi_margin_loss, torch.randint(_SCORES, scores.shape[:1])


_LOSSES = [_cross_entropy, _cross_entropy, _squares, _squares, _binary, _divergence, _cosine, _margin]
