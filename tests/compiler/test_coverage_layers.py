"""Layers through the backend, against eager: outputs, gradients and buffers, at two batch sizes, dropout on."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from parity import assert_same_tensors, step_tensors
from torch import nn

from lightning_ort.compiler import ORTBackend

pytestmark = pytest.mark.stock_only

BATCH = 6
VECTOR, SEQUENCE, IMAGE, VOLUME = (8,), (5, 8), (4, 9, 9), (4, 6, 6, 6)


def conv(**options):
    return lambda: nn.Conv2d(4, 6, **options)


def pool(function, **options):
    return lambda: Function(lambda x: function(x, **options), nn.Conv2d(4, 4, 1))


class Function(nn.Module):
    """A function behind a layer, so that gradients pass through it."""

    def __init__(self, function, *layers):
        super().__init__()
        self.layers, self.function = nn.Sequential(*layers), function

    def forward(self, x):
        return self.function(self.layers(x))


class Tokens(nn.Module):
    """An embedding of numbers made from the input, which has no gradient."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer((x.flatten(1)[:, :7].abs() * 5).long() % 10)


def attention(**options):
    def attend(x):
        q, k, v = x.unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        mask = options.get("attn_mask")
        return F.scaled_dot_product_attention(q, k, v, **(options | ({"attn_mask": mask()} if mask else {})))

    return lambda: Function(attend, nn.Linear(8, 24))


def first(module):
    return lambda: Function(lambda x: x, module(), Pick())


class Pick(nn.Module):
    def forward(self, results):
        return results[0]


LAYERS = {
    "linear": (lambda: nn.Linear(8, 3), VECTOR),
    "layer norm": (lambda: nn.LayerNorm(8), SEQUENCE),
    "rms norm": (lambda: nn.RMSNorm(8), SEQUENCE),
    "group norm": (lambda: nn.GroupNorm(2, 4), IMAGE),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), IMAGE),
    "batch norm 1d": (lambda: nn.BatchNorm1d(8), VECTOR),
    "batch norm 2d": (lambda: nn.BatchNorm2d(4), IMAGE),
    "batch norm 2d, cumulative": (lambda: nn.BatchNorm2d(4, momentum=None), IMAGE),
    "batch norm 2d, eval": (lambda: nn.BatchNorm2d(4).eval(), IMAGE),
    "conv 1d": (lambda: nn.Conv1d(5, 6, 3, stride=2, dilation=2), SEQUENCE),
    "conv": (conv(kernel_size=3), IMAGE),
    "conv, stride": (conv(kernel_size=3, stride=2, padding=1), IMAGE),
    "conv, stride over kernel": (conv(kernel_size=1, stride=3), IMAGE),
    "conv, same": (conv(kernel_size=3, padding="same"), IMAGE),
    "conv, reflect": (conv(kernel_size=3, padding=1, padding_mode="reflect"), IMAGE),
    "conv, dilation": (conv(kernel_size=3, dilation=2, padding=2), IMAGE),
    "conv, groups": (conv(kernel_size=3, groups=2, padding=1), IMAGE),
    "conv, depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, stride=2), IMAGE),
    "conv 3d": (lambda: nn.Conv3d(4, 3, 3, padding=1, stride=2), VOLUME),
    "transposed conv": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), IMAGE),
    "transposed conv, groups": (lambda: nn.ConvTranspose2d(4, 6, 4, stride=2, groups=2), IMAGE),
    "max pool": (pool(F.max_pool2d, kernel_size=2), IMAGE),
    "max pool, overlapping": (pool(F.max_pool2d, kernel_size=3, stride=2, padding=1), IMAGE),
    "max pool 3d": (lambda: Function(lambda x: F.max_pool3d(x, 2), nn.Conv3d(4, 2, 1)), VOLUME),
    "avg pool": (pool(F.avg_pool2d, kernel_size=3, stride=2, padding=1), IMAGE),
    "avg pool, ceil": (pool(F.avg_pool2d, kernel_size=2, stride=2, ceil_mode=True), IMAGE),
    "avg pool, padding left out": (
        pool(F.avg_pool2d, kernel_size=3, stride=2, padding=1, count_include_pad=False),
        IMAGE,
    ),
    "adaptive avg pool": (pool(F.adaptive_avg_pool2d, output_size=4), IMAGE),
    "adaptive max pool": (pool(F.adaptive_max_pool2d, output_size=4), IMAGE),
    "fractional max pool": (pool(F.fractional_max_pool2d, kernel_size=2, output_size=(5, 3)), IMAGE),
    "fractional max pool 3d": (
        lambda: Function(lambda x: F.fractional_max_pool3d(x, 2, output_ratio=0.6), nn.Conv3d(4, 2, 1)),
        VOLUME,
    ),
    "upsample nearest": (pool(F.interpolate, scale_factor=2), IMAGE),
    "upsample bilinear": (pool(F.interpolate, size=(13, 15), mode="bilinear", align_corners=True), IMAGE),
    "upsample bicubic": (pool(F.interpolate, scale_factor=2, mode="bicubic"), IMAGE),
    "pixel shuffle": (pool(F.pixel_shuffle, upscale_factor=2), IMAGE),
    "unfold": (pool(F.unfold, kernel_size=3, padding=1), IMAGE),
    "pad replicate": (pool(F.pad, pad=(1, 1, 1, 1), mode="replicate"), IMAGE),
    "pad circular": (pool(F.pad, pad=(1, 1, 1, 1), mode="circular"), IMAGE),
    "embedding": (lambda: Tokens(nn.Embedding(10, 8, padding_idx=3)), VECTOR),
    "embedding bag": (lambda: Tokens(nn.EmbeddingBag(10, 8)), VECTOR),
    "embedding bag, sum": (lambda: Tokens(nn.EmbeddingBag(10, 8, mode="sum")), VECTOR),
    "lstm": (first(lambda: nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True, dropout=0.2)), SEQUENCE),
    "gru": (first(lambda: nn.GRU(8, 8, batch_first=True)), SEQUENCE),
    "rnn": (first(lambda: nn.RNN(8, 8, batch_first=True)), SEQUENCE),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), SEQUENCE),
    "encoder layer, norm first": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True, activation="gelu"),
        SEQUENCE,
    ),
    "attention": (attention(), SEQUENCE),
    "attention, causal": (attention(is_causal=True), SEQUENCE),
    "attention, mask": (attention(attn_mask=lambda: torch.ones(5, 5, dtype=torch.bool).tril()), SEQUENCE),
    "attention, dropout": (attention(dropout_p=0.2), SEQUENCE),
    "dropout": (lambda: Function(lambda x: F.dropout(x, 0.3), nn.Linear(8, 8)), VECTOR),
    "dropout 2d": (lambda: Function(lambda x: F.dropout2d(x, 0.3), nn.Conv2d(4, 4, 1)), IMAGE),
    "alpha dropout": (lambda: Function(lambda x: F.alpha_dropout(x, 0.3, True), nn.Linear(8, 8)), VECTOR),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)), VECTOR),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)), VECTOR),
}  # fmt: skip


def scalar(out: torch.Tensor) -> torch.Tensor:
    """A loss that weighs every entry differently and grows with its square."""
    weights = torch.cos(torch.arange(out[0].numel(), dtype=out.dtype, device=out.device)).reshape(out.shape[1:])
    return (out * weights).mean() + out.square().mean()


@pytest.mark.parametrize("name", LAYERS)
@torch._dynamo.config.patch(allow_rnn=True)
def test_layer(name):
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    ours = make()
    eager = copy.deepcopy(ours)
    fallbacks: list = []
    graphs: list = []
    step = torch.compile(
        lambda x: scalar(ours(x)), backend=ORTBackend(on_fallback=fallbacks.extend, on_graph=graphs.append)
    )
    for size in (BATCH, BATCH - 2):
        x = torch.randn(size, *shape)
        got = step_tensors(ours, step, x)
        assert_same_tensors(got, step_tensors(eager, lambda x: scalar(eager(x)), x))
    assert len(graphs) == 2
    assert not fallbacks
