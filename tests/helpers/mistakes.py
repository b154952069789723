"""A LightningModule with one mistake of many in its steps; pytest would rewrite the assertion in a file of tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import MeanSquaredError


class Deep(nn.Module):
    """The mistake lies in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(5, 2)

    def forward(self, x):
        doubled = x * 2
        return self.narrow(doubled)


class OwnError(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code


class Mistaken(LightningModule):
    """Makes the mistake of its name in the second batch, or in whatever step is not a training step."""

    def __init__(self, mistake: str, *, manual: bool = False) -> None:
        super().__init__()
        self.mistake, self.automatic_optimization = mistake, not manual
        self.body, self.head, self.words, self.deep = nn.Linear(6, 8), nn.Linear(8, 3), nn.Embedding(5, 6), Deep()
        self.error, self.others = MeanSquaredError(), {"error": MeanSquaredError()}

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            self._log_loss(self.body(batch[0]).sum())
            return F.cross_entropy(self(batch[0]), batch[1]) if self.automatic_optimization else None
        return getattr(self, self.mistake)(*batch)

    def predict_step(self, batch, batch_idx):
        return getattr(self, self.mistake)(*batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def shape(self, x, y):
        return self.deep(x).sum()

    def dtype(self, x, y):
        doubled = x.double()
        return self.body(doubled).sum()

    def device(self, x, y):
        return self(x.to("meta")).sum()

    def index(self, x, y):
        rows = self.words(y + 10)
        return self(rows).sum()

    def label(self, x, y):
        return F.cross_entropy(self(x), y + 7)

    def assertion(self, x, y):
        scores = self(x)
        assert (scores > 100).all(), "scores are low"
        return scores.sum()

    def arguments(self, x, y):
        return self(x, y)

    def key(self, x, y):
        return self({"x": x}["image"])

    def attribute(self, x, y):
        hidden = self.body(x)
        return self.tail(hidden).sum()

    def option(self, x, y):
        return F.cross_entropy(self(x), y, reduction="average")

    def raised(self, x, y):
        scores = self(x)
        torch._dynamo.graph_break()
        if scores.shape[1] != 4:
            raise OwnError(4, f"expected 4 scores, got {scores.shape[1]}")
        return scores.sum()

    def after_a_break(self, x, y):
        scores = self(x)
        torch._dynamo.graph_break()
        return self.head(scores).sum()

    def caught(self, x, y):
        try:
            return self.head(x).sum()
        except RuntimeError as error:
            raise OwnError(5, "wrong input") from error

    def vector(self, x, y):
        self.log("scores", self(x))
        return self(x).sum()

    def reduction(self, x, y):
        loss = F.cross_entropy(self(x), y)
        self.log_dict({"loss": loss}, reduce_fx="median")
        return loss

    def twice(self, x, y):
        loss = F.cross_entropy(self(x), y)
        self.log("twice", loss, on_epoch=True)
        self.log("twice", loss, on_epoch=False)
        return loss

    def otherwise(self, x, y):
        """The other batches log it with the Trainer's own choice."""
        loss = F.cross_entropy(self(x), y)
        self._log_loss(loss, on_epoch=True)
        return loss

    def _log_loss(self, loss, **options):
        scaled = loss * 1.0
        self.log("loss", scaled, **options)

    def unknown(self, x, y):
        loss = F.cross_entropy(self(x), y)
        self.log("error", self.others["error"])
        return loss

    def update(self, x, y):
        scores = self(x)
        self.error.update(scores, y)
        return F.cross_entropy(scores, y)


class Iterating(Mistaken):
    """Lightning cannot tell the size of a batch that a step fetches by itself."""

    def training_step(self, dataloader_iter):
        (x, y), _, _ = next(dataloader_iter)
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss


def step_with_assertion(x):
    doubled = x * 2
    assert (doubled < 10).all(), "too large"
    return doubled.sum()
