"""The LightningModules that are timed, one a file.

Each file defines ``make_module()``, a LightningModule as a Lightning user writes it, and ``make_batch(generator)``. A
module whose attribute ``logs`` is set to ``False`` logs nothing; ``fused`` goes to its optimizer.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["MODELS", "load"]

MODELS = {
    "rl": "policy MLP 8-64-64-4, batch 32",
    "tabular": "8 embedded + 10 numeric columns, batch 128",
    "mlp": "784-256-256-10, batch 64",
    "cnn": "conv, BatchNorm, max-pool 32-64-128, batch 32x3x32x32",
    "resnet": "ResNet-18, 3x3 stem, batch 32x3x32x32",
    "gpt": "d 256, 4 layers, batch 8x128",
    "bert": "nn.TransformerEncoder d 256, 4 layers, batch 8x128",
    "lstm": "language model d 256, 2 layers, batch 16x64",
}


def load(name: str) -> ModuleType:
    """The file that defines the model ``name``; not imported before, because it imports torch."""
    return importlib.import_module(f"{__name__}.{name}")
