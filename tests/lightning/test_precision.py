"""Double precision to 1e-9, single precision by its other spellings."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from modules import Classifier, ConvNet, Regressor, TextClassifier, curve, images, sentences, table
from parity import (
    STRATEGY,
    MemoryLogger,
    assert_fit_parity,
    assert_in_ort,
    assert_same_metrics,
    make_trainer,
    quiet,
)
from torch import nn


class Descends(Regressor):
    """Plain SGD, which feels the size of each gradient, where Adam hides a factor."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Attends(Regressor):
    """Attention with dropout, GELU and LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True, activation="gelu")

    def forward(self, x):
        return super().forward(self.layer(x.view(-1, 3, 4)).flatten(1))

    def configure_optimizers(self):  # Adam would amplify the key bias, whose gradient is zero but for rounding
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize(
    ("make", "train"),
    [
        (partial(Classifier, dropout=0.3), table),
        (ConvNet, images),
        (Regressor, curve),
        (Descends, partial(curve, batch_size=12)),  # 2 / 12 is no float32, unlike 2 / 16
        (Attends, curve),
        (TextClassifier, sentences),
    ],
    ids=["batch norm and dropout", "convolutions", "Adam", "SGD", "attention", "embedding and lengths"],
)
def test_double(make, train):
    """Weights, statistics and losses agree to 1e-9, and the weights are double."""
    # ONNX Runtime's Erf and AveragePool are for single precision
    in_torch = ("aten.gelu", "aten.erf", "aten.avg_pool2d")
    _, other = assert_fit_parity(
        make, train, partial(train, 24), precision="64-true", logger=MemoryLogger, in_torch=in_torch
    )
    assert {p.dtype for p in other.module.parameters()} == {torch.float64}
    assert {b.dtype for b in other.module.buffers() if b.is_floating_point()} <= {torch.float64}


@pytest.mark.parametrize("precision", [32, "32", "32-true"])
def test_spellings_of_single(precision):
    _, other = assert_fit_parity(Regressor, curve, precision=precision)
    assert {p.dtype for p in other.module.parameters()} == {torch.float32}


def test_double_evaluation():
    results = []
    for strategy in ("auto", STRATEGY):
        torch._dynamo.reset()
        torch.manual_seed(0)
        trainer = make_trainer(strategy, precision=64)
        module = Classifier()
        with quiet():
            (metrics,) = trainer.test(module, table(40), verbose=False)
            predictions = torch.cat(trainer.predict(module, table(40)))
        results.append((metrics, predictions))
    assert results[1][1].dtype == torch.float64
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-12, atol=1e-12)
    assert_same_metrics(results[0][0], results[1][0], relative=1e-9)
    assert_in_ort(trainer, "predict_step")


class Mixed(Regressor):
    """Double parameters in a module that is otherwise single: the dtypes of every tensor are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 1, dtype=torch.float64)

    def forward(self, x):
        return self.head(self.body(x).double())

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self(x), y.double())


def test_single_and_double_together():
    """Weights fed by single-precision layers can agree only to single precision."""
    eager, _ = assert_fit_parity(Mixed, curve, tolerance=1e-4)
    assert {p.dtype for p in eager.module.parameters()} == {torch.float32, torch.float64}
