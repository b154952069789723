"""Everyday projects that are timed from start to end, one a file: training, validation, prediction.

Each file defines ``make_module()``, ``make_data()``, a LightningDataModule whose epoch takes eager torch a second or
two, and perhaps ``make_callbacks()``. They download nothing.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["PROJECTS", "load"]

PROJECTS = {
    "bert": "BERT with dynamic padding, paragraphs of Python's manual",
    "unet": "U-Net with BatchNorm, binary masks of 48x48",
    "gan": "DCGAN of digits, manual optimization",
    "lstm": "packed bidirectional LSTM with attention, the same paragraphs",
    "tabular": "embedded columns, early stopping",
    "byol": "BYOL of digits, a target network by moving average",
}


def load(name: str) -> ModuleType:
    """The file that defines the project ``name``; not imported before, because it imports torch."""
    return importlib.import_module(f"{__name__}.{name}")
