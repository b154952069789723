"""Update rules, each a formula in torch calls whose coefficients are inputs."""

from __future__ import annotations

from lightning_ort.optim.rules.adam import Adam, Adamax, Lamb, NAdam, RAdam
from lightning_ort.optim.rules.adaptive import Adadelta, Adagrad, RMSprop
from lightning_ort.optim.rules.fused import FusedAdam
from lightning_ort.optim.rules.rule import Decayed, Rule
from lightning_ort.optim.rules.sgd import SGD, Momentum

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "Adamax",
    "Decayed",
    "FusedAdam",
    "Lamb",
    "Momentum",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rule",
]
