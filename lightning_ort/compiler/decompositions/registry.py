"""Decompositions of this package, collected from the modules beside this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["DECOMPOSITIONS", "KEPT", "decomposes", "keeps"]

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
KEPT: set[Any] = set()


def decomposes(*overloads: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function with the signature of the ATen overloads, written in simpler torch calls.

    It may return ``NotImplemented`` to leave a call as it is.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for overload in overloads:
            if overload in DECOMPOSITIONS:
                raise ValueError(f"{overload} is already decomposed by {DECOMPOSITIONS[overload].__qualname__}")
            DECOMPOSITIONS[overload] = function
        return function

    return register


def keeps(*overloads: Any) -> None:
    """Leave these overloads whole although torch would decompose them: ONNX has an operator for them."""
    KEPT.update(overloads)
