"""``torch.distributions`` in graphs: log-probabilities of eager, and its refusals."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule
from parity import assert_fit_parity, fit
from torch import nn
from torch.distributions import (
    Bernoulli,
    Beta,
    Categorical,
    Dirichlet,
    Distribution,
    Independent,
    LogNormal,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    Poisson,
    Uniform,
    kl_divergence,
)
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [pytest.mark.stock_only, pytest.mark.usefixtures("checked_distributions")]

EYE = torch.eye(3, dtype=torch.float64)


def rows():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 6, dtype=torch.float64, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(0, 3, (24,), generator=generator)), batch_size=6)


class Likelihood(LightningModule):
    """Minimizes ``function(scores, x, labels)``."""

    def __init__(self, function):
        super().__init__()
        self.scores, self.function = nn.Linear(6, 3).double(), function

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.function(self.scores(x), x[:, :3], y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def mixture(z, x, y):
    parts = MixtureSameFamily(Categorical(logits=z), Normal(z, z.exp()))
    return -parts.log_prob(x[:, 0]).mean()


FITTING = {
    "normal": lambda z, x, y: -Normal(z, 1.0).rsample().cos().mean() - Normal(z, z.exp()).log_prob(x).mean(),
    "divergence": lambda z, x, y: kl_divergence(Normal(z, z.exp()), Normal(0.0, 1.0)).mean(),
    "categorical": lambda z, x, y: -Categorical(logits=z).log_prob(y).mean() - Categorical(logits=z).entropy().mean(),
    "bernoulli": lambda z, x, y: -Independent(Bernoulli(logits=z), 1).log_prob((x > 0).double()).mean(),
    "multivariate": lambda z, x, y: -MultivariateNormal(z, EYE).log_prob(x).mean(),
    "beta": lambda z, x, y: -Beta(z.exp(), z.exp() + 1).log_prob(x.sigmoid()).mean(),
    "dirichlet": lambda z, x, y: -Dirichlet(z.exp()).log_prob(x.softmax(-1)).mean(),
    "log-normal": lambda z, x, y: -LogNormal(z, z.exp()).log_prob(x.exp()).mean(),
    "mixture": mixture,
}  # fmt: skip


@pytest.mark.parametrize("name", FITTING)
def test_they_are_eagers(name):
    _, other = assert_fit_parity(lambda: Likelihood(FITTING[name]), rows, max_epochs=2, precision="64-true", in_ort=())
    (step,) = other.trainer.strategy.report().values()
    assert not step.graph_breaks and not step.recompilations


REFUSED = {
    "scale": lambda z, x, y: -Normal(z, z).log_prob(x).mean(),
    "support": lambda z, x, y: -Uniform(0.0, z.exp()).log_prob(x).mean(),
    "class": lambda z, x, y: -Categorical(logits=z).log_prob(y + 3).mean(),
    "rate": lambda z, x, y: -Poisson(z).log_prob(y[:, None]).mean(),
    "covariance": lambda z, x, y: -MultivariateNormal(z, -EYE).log_prob(x).mean(),
    "simplex": lambda z, x, y: -Dirichlet(z.exp()).log_prob(x).mean(),
    "not a number": lambda z, x, y: -Normal(z / 0 * 0, 1.0).log_prob(x).mean(),
    "shape": lambda z, x, y: -Normal(z, 1.0).log_prob(x[:, :2]).mean(),
}


@pytest.mark.parametrize("strategy", ["auto", "ort"])
@pytest.mark.parametrize("name", REFUSED)
def test_they_refuse_what_eager_refuses(name, strategy):
    module = Likelihood(REFUSED[name])
    before = module.scores.weight.detach().clone()
    with pytest.raises(ValueError, match=r"Expected (parameter|value)|broadcastable"):
        fit(lambda: module, rows, strategy=strategy, precision="64-true")
    assert torch.equal(module.scores.weight, before)


def test_who_wants_no_checks():
    unchecked = lambda z, x, y: -Normal(z, z.abs(), validate_args=False).log_prob(x).mean()  # noqa: E731
    assert_fit_parity(lambda: Likelihood(unchecked), rows, precision="64-true", in_ort=())


def test_the_process_keeps_its_checks():
    init = Distribution.__init__
    fit(lambda: Likelihood(FITTING["normal"]), rows, precision="64-true")
    assert Distribution._validate_args and Distribution.__init__ is init
    with pytest.raises(ValueError, match="scale"):
        Normal(0.0, -1.0)
