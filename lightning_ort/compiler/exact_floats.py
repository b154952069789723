"""Sums, products and functions of floats that change, as Python computes them.

Dynamo keeps a float that changes as a symbol, and Sympy computes with it as mathematics does: ``0.3 * (0.9 * t)``
becomes ``0.27 * t``, and ``(1 - k / 10) * 10`` becomes ``10 - k``. Floats are rounded after each operation, so that
those differ in their last digit, and a comparison, or ``int()``, that depends on it has another answer. Here sums and
products stay as they were written, as quotients and powers do by torch's own functions.

Of the functions of :mod:`math`, Dynamo takes ``sin`` and some others into a graph, and compiles anew for each value of
``exp``, ``log`` and the rest, by which weights and temperatures grow and fade. Those are in a graph here, too.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch

# Private: the arithmetic of symbolic numbers has no public name.
from torch.fx.experimental.proxy_tensor import get_proxy_mode, handle_sym_dispatch
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy.functions import ToFloat

__all__ = ["EXACT_FLOATS", "FUNCTIONS", "IN_GRAPHS", "replaced"]


class _Rounded(sympy.Function):
    """An operation of two floats that nothing simplifies."""

    is_real = True
    is_commutative = True
    precedence = 1000  # it brings brackets of its own
    sign: str

    @staticmethod
    def compute(a: float, b: float) -> float:
        raise NotImplementedError

    @classmethod
    def eval(cls, a: Any, b: Any) -> Any:
        if isinstance(a, sympy.Number) and isinstance(b, sympy.Number):
            return sympy.Float(cls.compute(float(a), float(b)))
        return None

    def _torch_sympystr(self, printer: Any) -> str:
        """How torch's printers write it, in a guard say."""
        a, b = (printer._print(x) for x in self.args)
        return f"({a} {self.sign} {b})"


class FloatSum(_Rounded):
    """``a + b``, rounded."""

    sign, _torch_handler_name = "+", "add"

    @staticmethod
    def compute(a: float, b: float) -> float:
        return a + b


class FloatProduct(_Rounded):
    """``a * b``, rounded."""

    sign, _torch_handler_name = "*", "mul"

    @staticmethod
    def compute(a: float, b: float) -> float:
        return a * b


class _Function(sympy.Function):
    """A function of ``math`` of one float."""

    is_real = True
    _torch_handler_name = "tan"  # whose values may be anything
    name: str

    @classmethod
    def compute(cls, a: float) -> float:
        return float(getattr(math, cls.name)(a))

    @classmethod
    def eval(cls, a: Any) -> Any:
        return sympy.Float(cls.compute(float(a))) if isinstance(a, sympy.Number) else None

    def _torch_sympystr(self, printer: Any) -> str:
        return f"math.{self.name}({printer._print(self.args[0])})"


_NAMES = ("acosh", "asinh", "atanh", "cbrt", "erf", "erfc", "exp", "exp2", "expm1", "lgamma", "log", "log10", "log1p")
_KINDS: dict[str, type[_Function]] = {
    name: type(f"Float_{name}", (_Function,), {"name": name}) for name in _NAMES if hasattr(math, name)
}

_ALL: tuple[Any, ...] = FloatSum, FloatProduct, *_KINDS.values()
FUNCTIONS: dict[str, Callable[..., float]] = {kind.__name__: kind.compute for kind in _ALL}
"""What computes the same of floats, by the names of all of these."""


def _in_graphs(name: str, kind: type[_Function]) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        if not isinstance(x, (torch.SymInt, torch.SymFloat)):
            return kind.compute(x)
        if get_proxy_mode() is not None:
            return handle_sym_dispatch(function, (x,), {})
        node = x.node
        expression = node.expr if node.pytype is float else ToFloat(node.expr)
        hint = None if node.hint is None else kind.compute(node.hint)
        return torch.SymFloat(SymNode(kind(expression), node.shape_env, float, hint))

    function.__name__ = function.__qualname__ = f"float_{name}"
    return function


IN_GRAPHS: dict[str, Callable[[Any], Any]] = {name: _in_graphs(name, kind) for name, kind in _KINDS.items()}
"""What stands in graphs for functions of ``math``, by their names: those of one number for which Dynamo has nothing."""


def _exactly(make: Callable[[Any, Any], Any], compute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute)
    def computed(self: SymNode, other: SymNode) -> SymNode:
        result = compute(self, other)
        if result.pytype is float:
            result._expr, result._optimized_summation = make(self.expr, other.expr), False
            result._expr_ver, result._expr_cache = -1, None
        return result

    return computed


def _difference(a: Any, b: Any) -> Any:
    return FloatSum(a, -b)


EXACT_FLOATS: list[tuple[Any, str, Callable[..., Any]]] = [
    (SymNode, "_add", functools.partial(_exactly, FloatSum)),
    (SymNode, "_sub", functools.partial(_exactly, _difference)),
    (SymNode, "_mul", functools.partial(_exactly, FloatProduct)),
]
"""Methods by their owner, and what makes the ones that take their place."""


@contextlib.contextmanager
def replaced(methods: Sequence[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Have symbols compute by what is made of ``methods`` such as these, for a block."""
    originals = [getattr(owner, name) for owner, name, _ in methods]
    for (owner, name, make), original in zip(methods, originals, strict=True):
        setattr(owner, name, make(original))
    try:
        yield
    finally:
        for (owner, name, _), original in zip(methods, originals, strict=True):
            setattr(owner, name, original)
