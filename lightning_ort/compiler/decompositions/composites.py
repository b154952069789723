"""Operators rewritten before autograd sees them, so that their gradients come out in simple operators as well.

``make_fx`` applies a decomposition table below autograd. Torch has a few rewritings above it, on the Python
dispatcher; while a step is traced, :func:`composites` puts ours in their place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey

__all__ = ["composes", "composites"]

_COMPOSITES: dict[Any, Callable[..., Any]] = {}


def composes(*overloads: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function with the signature of the ATen overloads, written in differentiable torch calls.

    It may return ``NotImplemented`` to leave a call to torch.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for overload in overloads:
            if overload in _COMPOSITES:
                raise ValueError(f"{overload} is already rewritten by {_COMPOSITES[overload].__qualname__}")
            _COMPOSITES[overload] = function
        return function

    return register


@contextlib.contextmanager
def composites() -> Iterator[None]:
    """Have the Python dispatcher call the registered functions."""
    before = {overload: dict(overload.py_kernels) for overload in _COMPOSITES}
    for overload, function in _COMPOSITES.items():
        for key in _keys(overload):
            overload.py_kernels[key] = _or_torch(overload, function, before[overload].get(key))
        overload._dispatch_cache.clear()
    try:
        yield
    finally:
        for overload, kernels in before.items():
            overload.py_kernels.clear()
            overload.py_kernels.update(kernels)
            overload._dispatch_cache.clear()


def _keys(overload: Any) -> list[DispatchKey]:
    """Where calls of ``overload`` are caught: above autograd, which operators that torch itself composes never meet."""
    implicit = DispatchKey.CompositeImplicitAutograd
    composed = implicit in overload.py_kernels or overload.has_kernel_for_dispatch_key(implicit)
    return [DispatchKey.Autograd, implicit] if composed else [DispatchKey.Autograd]


def _or_torch(overload: Any, function: Callable[..., Any], torch_kernel: Callable[..., Any] | None) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if torch_kernel is not None:
            return torch_kernel(*args, **kwargs)
        with torch._C._DisablePythonDispatcher():
            return overload(*args, **kwargs)

    return kernel
