"""Parameter updates executed by ONNX Runtime: rules as torch formulas, and the graph that applies one in place."""

from __future__ import annotations

from lightning_ort.updates.adadelta import Adadelta
from lightning_ort.updates.adagrad import Adagrad
from lightning_ort.updates.adam import Adam
from lightning_ort.updates.adamax import Adamax
from lightning_ort.updates.decayed import Decayed
from lightning_ort.updates.fused import FusedAdam
from lightning_ort.updates.lamb import Lamb
from lightning_ort.updates.momentum import Momentum
from lightning_ort.updates.nadam import NAdam
from lightning_ort.updates.radam import RAdam
from lightning_ort.updates.rmsprop import RMSprop
from lightning_ort.updates.rule import Rule
from lightning_ort.updates.sgd import SGD
from lightning_ort.updates.update import Update

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
    "Update",
]
