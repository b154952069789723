"""One graph of a step has all batches of an epoch, the smaller one at its end too, whatever is in the step."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from parity import assert_same_state, fit, state_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTStrategy

IMAGES, SEQUENCES, ROWS = (4, 8, 8), (6, 8), (8,)


class Step(LightningModule):
    """The mean of the squares of ``function(layer, inputs)``."""

    def __init__(self, layer, function) -> None:
        super().__init__()
        self.layer, self.function, self.scale = layer, function, nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        return self.function(self.layer, batch[0] * self.scale).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def called(layer, x):
    return layer(x)


def first(layer, x):
    return layer(x)[0]


def contrast(layer, x):
    x = F.normalize(x, dim=-1)
    alike = (x @ x.T).masked_fill(torch.eye(len(x), dtype=torch.bool), -torch.inf)
    return F.cross_entropy(alike, torch.arange(len(x)).roll(1))


def decorrelated(layer, x):
    x = (x - x.mean(0)) / x.std(0)
    return x.T @ x / len(x) - torch.eye(8)


def sampled(layer, x):
    grid = F.affine_grid(0.9 * torch.eye(2, 3)[None], [1, 4, 8, 8], align_corners=False)
    return F.grid_sample(x, grid.expand(len(x), -1, -1, -1), align_corners=False)


CASES = {
    "convolutions": (
        IMAGES,
        called,
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 2, 2, 2)),
    ),
    "padded convolutions": (IMAGES, called, nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")),
    "transposed convolution": (IMAGES, called, nn.ConvTranspose2d(4, 4, 3, 2, 1, 1)),
    "convolution of sequences": (SEQUENCES, called, nn.Conv1d(6, 4, 3, padding="same")),
    "convolution of volumes": ((2, 4, 4, 4), called, nn.Conv3d(2, 2, 3)),
    "pools": (IMAGES, called, nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())),
    "adaptive maxima": (IMAGES, called, nn.AdaptiveMaxPool2d(3)),
    "batch normalization": (IMAGES, called, nn.Sequential(nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Hardswish())),
    "statistics of instances": (IMAGES, lambda layer, x: layer(x) * x, nn.InstanceNorm2d(4, affine=True)),
    "resized": (IMAGES, called, nn.Sequential(nn.Upsample(scale_factor=2), nn.Upsample(size=5, mode="bilinear"))),
    "patches": (IMAGES, lambda layer, x: F.fold(F.unfold(x, 3), 8, 3), None),
    "pixels": (IMAGES, lambda layer, x: F.pixel_shuffle(x, 2), None),
    "sampled": (IMAGES, sampled, None),
    "recurrent": (SEQUENCES, first, nn.LSTM(8, 5, batch_first=True, bidirectional=True)),
    "cell": (ROWS, first, nn.LSTMCell(8, 5)),
    "attention": (SEQUENCES, lambda layer, x: layer(x, x, x)[0], nn.MultiheadAttention(8, 2, batch_first=True)),
    "transformer": (SEQUENCES, lambda layer, x: layer(x, x), nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)),
    "weight norm": (ROWS, called, nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))),
    "bilinear": (ROWS, lambda layer, x: layer(x, x), nn.Bilinear(8, 8, 2)),
    "bags": (
        ROWS,
        lambda layer, x: layer((x.detach().abs() * 3).long().clamp(max=19)) * x.sum(),
        nn.EmbeddingBag(20, 4),
    ),
    "contrast": (ROWS, contrast, None),
    "decorrelated": (ROWS, decorrelated, None),
    "triplets": (ROWS, lambda layer, x: F.triplet_margin_loss(x, x.roll(1, 0), x.flip(0)), None),
    "mixed": (ROWS, lambda layer, x: 0.3 * x + 0.7 * x[torch.randperm(len(x))], None),
    "scattered": (ROWS, lambda layer, x: x.new_zeros(3, 8).index_add(0, torch.arange(len(x)) % 3, x), None),
    "per row": (ROWS, lambda layer, x: torch.vmap(lambda row: row.softmax(0) * row)(x), None),
}


def loader(shape) -> DataLoader:
    data = torch.randn(63, *shape, generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(data), 20)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", CASES)
def test_one_graph(name):
    shape, function, layer = CASES[name]

    def trained(strategy):
        return fit(lambda: Step(copy.deepcopy(layer), function), lambda: loader(shape), strategy=strategy)

    theirs, ours = trained("auto"), trained(ORTStrategy(placement="onnxruntime", print_report=False))
    assert_same_state(state_of(theirs.module), state_of(ours.module), 1e-4)
    step = ours.trainer.strategy.report()["training_step"]
    assert (step.graphs, step.recompilations, step.graph_breaks, step.in_torch) == (1, [], [], [])
