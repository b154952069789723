"""Steps that handle what torch raises for values: the handler is reached, as in eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from parity import ACCELERATOR, STRATEGY, assert_same_outcome, fit, step_report
from torch import nn
from torch.distributions import Normal
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTStrategy, UnsupportedError

pytestmark = [pytest.mark.stock_only, pytest.mark.usefixtures("checked_distributions")]

EYE = torch.eye(6, dtype=torch.float64, device=ACCELERATOR)


def rows():
    x = torch.randn(36, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x), batch_size=6)


class Handles(LightningModule):
    """Draws, then tries what fails from the third batch on."""

    breaks = False

    def __init__(self, attempt):
        super().__init__()
        self.layer, self.words, self.attempt = nn.Linear(6, 6).double(), nn.Embedding(4, 6).double(), attempt
        self.handled = 0

    def training_step(self, batch, batch_idx):
        h = F.dropout(self.layer(batch[0]), 0.3)
        self.log("mean", h.mean())
        if self.breaks:
            torch._dynamo.graph_break()
        return self.attempt(self, h, batch_idx < 2) + h.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def cholesky(s, h, fits):
    matrix = h @ h.T + (EYE if fits else -EYE)
    try:
        return torch.linalg.cholesky(matrix).diagonal().log().mean()
    except torch.linalg.LinAlgError:
        s.handled += 1
        return h.mean()


def solve(s, h, fits):
    try:
        return torch.linalg.solve(h.T @ h * (1.0 if fits else 0.0) + 0 * EYE, EYE).mean() * 1e-6
    except (KeyError, RuntimeError):
        s.handled += 1
        return h.mean()


def embedding(s, h, fits):
    numbers = torch.arange(6) % (4 if fits else 5)
    try:
        return s.words(numbers).mean()
    except IndexError:
        s.handled += 1
        return s.words(numbers % 4).mean()


def distribution(s, h, fits):
    try:
        return -Normal(h, h.exp() if fits else h).log_prob(h.detach()).mean()
    except ValueError:
        s.handled += 1
        return h.mean()


def inner(matrix):
    return torch.linalg.cholesky(matrix).diagonal().log().mean()


def outside(s, h, fits):
    try:
        return inner(h @ h.T + (EYE if fits else -EYE))
    except torch.linalg.LinAlgError:
        s.handled += 1
        return h.mean()


ATTEMPTS = [cholesky, solve, embedding, distribution, outside]


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_handlers_are_reached(attempt):
    eager, other = (fit(lambda: Handles(attempt), rows, strategy=s, max_epochs=2) for s in ("auto", STRATEGY))
    assert_same_outcome(eager, other)
    assert other.module.handled == eager.module.handled == 8
    step = step_report(other.trainer, "training_step")
    (entry,) = step.in_torch
    assert entry.what == "the step as a whole" and "a `try` around this call" in entry.reason
    assert __file__ in entry.source and step.calls == 12


def test_what_is_refused_where_torch_is_forbidden():
    with pytest.raises(UnsupportedError, match="a `try` around this call"):
        fit(lambda: Handles(cholesky), rows, strategy=ORTStrategy(on_unsupported="error"))


def memory(s, h, fits):
    """Handles what a call for values does not raise."""
    try:
        return s.words(torch.arange(6) % 4).mean()
    except RuntimeError:
        return h.mean()


def in_a_function(s, h, fits):
    try:
        return plain(s, h)
    except RuntimeError:
        return h.mean()


def plain(s, h):
    return torch.linalg.cholesky(h @ h.T + EYE).mean()


def after(s, h, fits):
    try:
        number = int("1")
    except ValueError:
        number = 0
    return number * torch.linalg.cholesky(h @ h.T + EYE).mean()


@pytest.mark.parametrize("attempt", [memory, in_a_function, after])
def test_other_handlers_keep_no_step_from_its_graph(attempt):
    eager, other = (fit(lambda: Handles(attempt), rows, strategy=s) for s in ("auto", STRATEGY))
    assert_same_outcome(eager, other)
    assert not any(e.what == "the step as a whole" for e in step_report(other.trainer, "training_step").in_torch)


class Breaks(Handles):
    breaks = True


class Counts(Handles):
    """Does something that is no part of a graph, before all else."""

    count = 0

    def training_step(self, batch, batch_idx):
        self.count += 1
        torch._dynamo.graph_break()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [Breaks, Counts])
def test_a_step_of_which_a_part_has_run_is_not_made_again(kind):
    """Torch's error is raised, as documented."""
    module = kind(cholesky)
    with pytest.raises(torch.linalg.LinAlgError):
        fit(lambda: module, rows, strategy=STRATEGY)
    assert getattr(module, "count", 3) == 3
