"""Which ATen operators are rewritten into simpler ones before they become ONNX, by family."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from torch._decomp import core_aten_decompositions

from lightning_ort.compiler.decompositions.registry import DECOMPOSITIONS, KEPT, decomposes, keeps

__all__ = ["decomposes", "draws", "keeps", "table"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


@functools.cache
def table() -> dict[Any, Callable[..., Any]]:
    """Overload to decomposition, for ``make_fx``: torch's core ATen set, changed where ONNX has a better form."""
    result = dict(core_aten_decompositions())
    for overload in KEPT:
        result.pop(overload, None)
    result.update(DECOMPOSITIONS)
    return result


@functools.cache
def draws() -> dict[Any, Callable[..., Any]]:
    """Those of random operators alone, for graphs that otherwise keep torch's own operators."""
    return {overload: f for overload, f in DECOMPOSITIONS.items() if f.__module__ == f"{__name__}.random"}
