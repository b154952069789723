"""Sums, products and functions of floats that change, as Python computes them.

Dynamo keeps a float that changes as a symbol, and Sympy computes with it as mathematics does: ``0.3 * (0.9 * t)``
becomes ``0.27 * t``, and ``(1 - k / 10) * 10`` becomes ``10 - k``. Floats are rounded after each operation, so that
those differ in their last digit, and a comparison, or ``int()``, that depends on it has another answer. Here sums and
products stay as they were written, as quotients and powers do by torch's own functions.

Of the functions of :mod:`math`, Dynamo takes ``sin`` and some others into a graph, and compiles anew for each value of
``exp`` and ``log``, by which weights and temperatures grow and fade. Those are in a graph here, too.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch

# Private: the arithmetic of symbolic numbers has no public name.
from torch.fx.experimental.proxy_tensor import get_proxy_mode, handle_sym_dispatch
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy.functions import ToFloat

__all__ = ["EXACT_FLOATS", "FUNCTIONS", "IN_GRAPHS", "exact_floats", "float_exp", "float_log"]


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
    """A function of one float."""

    is_real = True
    _torch_handler_name = "tan"  # whose values may be anything
    name: str

    @staticmethod
    def compute(a: float) -> float:
        raise NotImplementedError

    @classmethod
    def eval(cls, a: Any) -> Any:
        return sympy.Float(cls.compute(float(a))) if isinstance(a, sympy.Number) else None

    def _torch_sympystr(self, printer: Any) -> str:
        return f"math.{self.name}({printer._print(self.args[0])})"


class FloatExp(_Function):
    """``math.exp(a)``."""

    name = "exp"

    @staticmethod
    def compute(a: float) -> float:
        return math.exp(a)


class FloatLog(_Function):
    """``math.log(a)``."""

    name = "log"

    @staticmethod
    def compute(a: float) -> float:
        return math.log(a)


FUNCTIONS: dict[str, Callable[..., float]] = {
    kind.__name__: kind.compute for kind in (FloatSum, FloatProduct, FloatExp, FloatLog)
}
"""What computes the same of floats, by the names of all of these."""


def float_exp(x: Any) -> Any:
    """``math.exp``, also of a number that changes."""
    return _of_number(float_exp, FloatExp, x)


def float_log(x: Any) -> Any:
    """``math.log`` of one number, also of one that changes."""
    return _of_number(float_log, FloatLog, x)


IN_GRAPHS: dict[Any, Callable[[Any], Any]] = {math.exp: float_exp, math.log: float_log}
"""What stands for functions of ``math`` in graphs, for which Dynamo has nothing."""


def _of_number(function: Callable[[Any], Any], kind: type[_Function], x: Any) -> Any:
    if not isinstance(x, (torch.SymInt, torch.SymFloat)):
        return kind.compute(x)
    if get_proxy_mode() is not None:
        return handle_sym_dispatch(function, (x,), {})
    node = x.node
    expression = node.expr if node.pytype is float else ToFloat(node.expr)
    hint = None if node.hint is None else kind.compute(node.hint)
    return torch.SymFloat(SymNode(kind(expression), node.shape_env, float, hint))


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
def exact_floats() -> Iterator[None]:
    """Have symbols compute so, for a block."""
    originals = [getattr(owner, name) for owner, name, _ in EXACT_FLOATS]
    for (owner, name, make), original in zip(EXACT_FLOATS, originals, strict=True):
        setattr(owner, name, make(original))
    try:
        yield
    finally:
        for (owner, name, _), original in zip(EXACT_FLOATS, originals, strict=True):
            setattr(owner, name, original)
