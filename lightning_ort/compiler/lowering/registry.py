"""Which ATen operator is written by which function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["LOWERINGS", "NotLowered", "lowers"]

LOWERINGS: dict[Any, Callable[..., Any]] = {}
"""Overload (or operator of a symbolic size) to the function that writes it as ONNX nodes."""


class NotLowered(Exception):
    """This call has no faithful form in ONNX; it is placed in torch. The message is the reason shown to users."""


def lowers(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register ``f(g, node, *args, **kwargs)`` for the given overloads.

    ``g`` is the :class:`GraphBuilder`, ``node`` the fx node being written (``node.meta["val"]`` is the fake result),
    ``args`` and ``kwargs`` are the node's own: an fx node stands for a tensor or a symbolic number, everything else
    is a Python value. The function returns an ``onnx_ir.Value``, or a tuple of them for several results (``None``
    for a result that cannot be given; using it is an error).
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for target in targets:
            if target in LOWERINGS:
                raise ValueError(f"{target} is already lowered by {LOWERINGS[target].__qualname__}")
            LOWERINGS[target] = function
        return function

    return register
