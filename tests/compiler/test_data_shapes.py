"""Batches of every size and form."""

from __future__ import annotations

import collections
import dataclasses
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from modules import CLASSES, FEATURES, VOCABULARY, Classifier, Regressor, TextClassifier, curve, sentences, table
from parity import MemoryLogger, assert_fit_parity
from torch import nn
from torch.utils.data import DataLoader


@pytest.mark.parametrize("last", [5, 1])
def test_smaller_last_batch(last):
    """The smaller batch needs a second graph, a third size (validation) none of its own."""
    n = 4 * 16 + last
    make = Regressor if last == 1 else Classifier  # BatchNorm refuses a batch of one
    loader = curve if last == 1 else table
    eager, _ = assert_fit_parity(
        make, partial(loader, n, shuffle=True), partial(loader, 16 + last, seed=1), graphs=3, logger=MemoryLogger
    )
    assert eager.trainer.global_step == 50


def test_batch_size_changes_in_every_batch():
    class Sizes(torch.utils.data.Sampler):
        def __iter__(self):
            start = 0
            for size in (16, 3, 9, 20, 7, 12, 5, 24):
                yield list(range(start, start + size))
                start += size

        def __len__(self):
            return 8

    def loader():
        return DataLoader(curve(96).dataset, batch_sampler=Sizes())

    assert_fit_parity(Regressor, loader, graphs=3)


class Recurrent(TextClassifier):
    """A GRU over packed or padded sequences is the usual text model of a tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)

    def forward(self, tokens):
        states, _ = self.gru(self.embedding(tokens))
        return self.head(states.mean(1))


class Attention(TextClassifier):
    """A transformer encoder with a padding mask, learned positions, and a causal mask."""

    def __init__(self, is_causal: bool | None = True) -> None:
        super().__init__(lr=0.05)
        self.is_causal = is_causal
        self.positions = nn.Embedding(32, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.embedding(tokens) + self.positions(torch.arange(length, device=tokens.device))
        causal = torch.triu(torch.ones(length, length, dtype=torch.bool, device=tokens.device), diagonal=1)
        x = self.encoder(x, mask=causal, src_key_padding_mask=tokens == 0, is_causal=self.is_causal)
        return self.head(x[:, 0] + x.mean(1))


@pytest.mark.parametrize(
    "make",
    [TextClassifier, Attention, partial(Attention, is_causal=None)],
    ids=["mean", "attention", "attention that does not say what its mask is"],
)
def test_variable_length_without_a_compilation_per_length(make):
    """Ten lengths, at most three graphs."""
    assert len({tokens.shape[1] for tokens, _ in sentences()}) == 10
    # in validation the length changes first, then the size of the last batch: two recompilations of each region
    assert_fit_parity(make, sentences, partial(sentences, 20), graphs=3, recompilations=3)


def test_recurrent_network():
    """Fixed length: ONNX Runtime unrolls it."""
    assert_fit_parity(Recurrent, partial(sentences, shortest=6, longest=6), graphs=1)


@dataclasses.dataclass
class Item:
    """A batch as a dataclass, with fields that are no tensors."""

    x: torch.Tensor
    y: torch.Tensor
    name: str = "batch"
    weight: float = 1.0


class Pair(NamedTuple):
    """A batch as a named tuple."""

    x: torch.Tensor
    y: torch.Tensor


class Encoding(collections.UserDict):
    """A batch as Hugging Face tokenizers make it: a mapping with attributes and ``to``."""

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device):
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


class FromDict(Regressor):
    """Reads a nested dict; names (other strings in every batch) and sizes travel along."""

    def training_step(self, batch, batch_idx):
        (x, more), y = batch["inputs"]["x"], batch["target"]
        assert len(batch["names"]) == batch["size"]
        loss = F.mse_loss(self(x + 0.1 * more), y)
        self.log("train_loss", loss, batch_size=batch["size"])
        return loss


class FromAttributes(Regressor):
    """Reads a dataclass, a named tuple or an encoding."""

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch.x), batch.y) * getattr(batch, "weight", 1.0)
        self.log("train_loss", loss, batch_size=batch.x.shape[0])
        return loss


class FromKeywords(Regressor):
    """Passes the mapping on as keyword arguments."""

    def compute(self, x, y, **others):
        return F.mse_loss(self(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.compute(**batch)
        self.log("train_loss", loss, batch_size=batch["x"].shape[0])
        return loss


def collated(collate):
    """A loader of the curve with its own batch form."""
    samples = list(zip(*curve(90).dataset.tensors, range(90), strict=True))
    return DataLoader(samples, batch_size=16, collate_fn=collate)


def as_dict(samples):
    x, y, index = zip(*samples, strict=True)
    return {
        "inputs": {"x": [torch.stack(x), torch.stack(x).flip(0)]},
        "target": torch.stack(y),
        "names": [f"sample {i}" for i in index],
        "size": len(samples),
    }


def as_dataclass(samples):
    x, y, index = zip(*samples, strict=True)
    return Item(torch.stack(x), torch.stack(y), name=f"batch from {index[0]}", weight=1.0 + 0.01 * index[0])


def as_pair(samples):
    x, y, _ = zip(*samples, strict=True)
    return Pair(torch.stack(x), torch.stack(y))


def as_encoding(samples):
    x, y, _ = zip(*samples, strict=True)
    return Encoding(x=torch.stack(x), y=torch.stack(y))


def as_mapping(samples):
    x, y, index = zip(*samples, strict=True)
    return {"x": torch.stack(x), "y": torch.stack(y), "index": torch.tensor(index)}


@pytest.mark.parametrize(
    ("make", "collate"),
    [
        (FromDict, as_dict),
        (FromAttributes, as_dataclass),
        (FromAttributes, as_pair),
        (FromAttributes, as_encoding),
        (FromKeywords, as_mapping),
    ],
    ids=["nested dict", "dataclass", "named tuple", "encoding", "keywords"],
)
def test_batch_forms(make, collate):
    """Floats and sizes in the batch change with it; that may cost a compilation or two, not one a step."""
    assert_fit_parity(make, partial(collated, collate), graphs=4, logger=MemoryLogger)


class Dtypes(Regressor):
    """Inputs of many dtypes: uint8 images, int16 and int32 codes, bool masks, float64 weights, a float16 feature."""

    def training_step(self, batch, batch_idx):
        pixels, codes, mask, weights, half = batch
        x = pixels.float() / 255 + codes.float().unsqueeze(-1) * 0.1
        x = torch.where(mask, x, torch.zeros_like(x)) + half.float()
        error = self(x).squeeze(-1) - x.mean(-1)
        return (error.pow(2) * weights.float()).mean()


def dtypes():
    generator = torch.Generator().manual_seed(0)
    n = 96
    tensors = (
        torch.randint(0, 256, (n, FEATURES), generator=generator, dtype=torch.uint8),
        torch.randint(-5, 5, (n,), generator=generator, dtype=torch.int16),
        torch.rand(n, FEATURES, generator=generator) > 0.3,
        torch.rand(n, generator=generator, dtype=torch.float64),
        torch.rand(n, FEATURES, generator=generator).half(),
    )
    return DataLoader(torch.utils.data.TensorDataset(*tensors), batch_size=16)


def test_input_dtypes():
    assert_fit_parity(Dtypes, dtypes, graphs=1)


class Strided(Regressor):
    """Inputs that are views: transposed, sliced, expanded, flipped."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        wide = torch.cat([x, x.flip(1)], 1)
        return wide[:, ::2], y.t().contiguous().t(), x[:1].expand(len(x), -1)

    def training_step(self, batch, batch_idx):
        x, y, first = batch
        return F.mse_loss(self(x + 0.1 * first), y)


def test_inputs_that_are_views():
    assert_fit_parity(Strided, curve, graphs=1)


class SeveralLoaders(Regressor):
    """Two training loaders at once and two validation loaders, told apart by dataloader_idx."""

    def training_step(self, batch, batch_idx):
        return sum(weight * F.mse_loss(self(x), y) for weight, (x, y) in zip((1.0, 0.3), batch.values(), strict=True))

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y) * (dataloader_idx + 1))


def test_several_loaders():
    def train():
        return {"a": curve(96), "b": curve(96, seed=5)}

    def val():
        return [curve(32, seed=1), curve(40, seed=2)]

    eager, _ = assert_fit_parity(SeveralLoaders, train, val, graphs=4)
    assert set(eager.trainer.callback_metrics) == {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"}


class TakesIterator(Regressor):
    """Asks for the iterator itself, Lightning's dataloader_iter flavor."""

    def training_step(self, dataloader_iter):
        (x, y), _, _ = next(dataloader_iter)
        return F.mse_loss(self(x), y)


def test_dataloader_iter():
    """The step fetches its own batch; what cannot be compiled may run in torch, with eager's weights."""
    assert_fit_parity(TakesIterator, curve, in_ort=())


class OneHot(Regressor):
    """Shapes that depend on a Python number in the batch: the number of classes seen so far."""

    def training_step(self, batch, batch_idx):
        tokens, y = batch
        counts = F.one_hot(tokens[:, :FEATURES] % FEATURES, FEATURES).float().mean(1)
        return F.mse_loss(self(counts), y.float().unsqueeze(-1)) + 0.01 * CLASSES * VOCABULARY


def test_integer_operations():
    assert_fit_parity(OneHot, partial(sentences, shortest=FEATURES, longest=20), graphs=3)
