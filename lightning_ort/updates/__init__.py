"""Parameter updates executed by ONNX Runtime: rules as torch formulas, and the graph that applies one in place."""

from __future__ import annotations

from lightning_ort.updates.adam import Adam
from lightning_ort.updates.decayed import Decayed
from lightning_ort.updates.fused import FusedAdam
from lightning_ort.updates.lamb import Lamb
from lightning_ort.updates.momentum import Momentum
from lightning_ort.updates.rule import Rule
from lightning_ort.updates.sgd import SGD
from lightning_ort.updates.update import Update

__all__ = ["SGD", "Adam", "Decayed", "FusedAdam", "Lamb", "Momentum", "Rule", "Update"]
