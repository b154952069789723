"""ATen operators written as ONNX nodes, by family."""

from __future__ import annotations

import importlib
import pkgutil

from lightning_ort.compiler.lowering.builder import GraphBuilder
from lightning_ort.compiler.lowering.registry import LOWERINGS, NotLowered, lowers

__all__ = ["LOWERINGS", "GraphBuilder", "NotLowered", "lowers"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
