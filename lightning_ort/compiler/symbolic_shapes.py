"""Symbolic sizes computed from the inputs of a run."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from sympy.printing.pycode import PythonCodePrinter
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lightning_ort.compiler.exact_floats import FUNCTIONS

__all__ = ["Sizes", "UnknownSize", "entries_in_order", "hint", "is_number", "open_dims"]

Number = Any  # int, float or their symbolic counterparts

# torch's own sympy functions, by their names
_FUNCTIONS: dict[str, Any] = {
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": lambda a, b: -(-a // b),
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "ModularIndexing": lambda a, b, c: a // b % c,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "ToFloat": float,
    "TruncToInt": math.trunc,
    "FloorToInt": math.floor,
    "CeilToInt": math.ceil,
    "RoundToInt": round,
    "IntPow": operator.pow,
    "FloatPow": operator.pow,
    "PowByNatural": operator.pow,
    "Max": max,
    "Min": min,
    "Where": lambda c, a, b: a if c else b,
    "TruncToFloat": lambda a: float(math.trunc(a)),
    "RoundDecimal": round,
    "Identity": lambda a: a,
    "LShift": operator.lshift,
    "RShift": operator.rshift,
    "BitwiseFn_bitwise_and": operator.and_,
    "BitwiseFn_bitwise_or": operator.or_,
    "BitwiseFn_bitwise_xor": operator.xor,
}
_OF_MATH = ("acos", "asin", "asinh", "atan", "cos", "cosh", "exp", "log", "log2", "sin", "sinh", "sqrt", "tan", "tanh")
_FUNCTIONS |= FUNCTIONS | {f"OpaqueUnaryFn_{name}": getattr(math, name) for name in _OF_MATH}


def open_dims(tensor: torch.Tensor) -> set[int]:
    """The dimensions of a fake tensor whose size is open, and not settled by what was assumed since."""
    sizes = enumerate(tensor.shape)
    return {dim for dim, size in sizes if isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None}


def entries_in_order(sizes: Sequence[Number], strides: Sequence[Number]) -> Number | None:
    """How many there are, if they are known to lie row by row, whatever the open sizes are; else ``None``.

    Strides along sizes of 1 say nothing.
    """
    count: Any = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if not statically_known_true(stride == count) and not statically_known_true(size == 1):
            return None
        count = count * size
    return count


class UnknownSize(Exception):
    """A number cannot be told from the inputs of a run."""


class Sizes:
    """Knows where each symbol of a graph is found among its inputs, and evaluates expressions of them.

    Args:
        inputs: placeholders of the graph, in the order in which values are passed to :meth:`evaluator`'s results.
    """

    def __init__(self, inputs: Sequence[fx.Node]) -> None:
        self._sources: dict[sympy.Symbol, tuple[int, int | None]] = {}
        self._floats: set[sympy.Symbol] = set()  # of those, what arrives as a tensor of that number
        for i, node in enumerate(inputs):
            val = node.meta["val"]
            if isinstance(val, (torch.SymInt, torch.SymFloat)):
                self._learn(val, i, None)
        for i, node in enumerate(inputs):
            val = node.meta["val"]
            if isinstance(val, torch.Tensor):
                for d, size in enumerate(val.shape):
                    self._learn(size, i, d)
        for i, node in enumerate(inputs):
            for user in node.users:
                if user.target is torch.ops.aten._local_scalar_dense.default and node.meta["val"].device.type == "cpu":
                    symbol = self._learn(user.meta["val"], i, None)
                    if symbol is not None:
                        self._floats.add(symbol)

    def _learn(self, number: Number, index: int, dim: int | None) -> sympy.Symbol | None:
        """Remember where the symbol ``number`` is found; give it if that was not known."""
        expression = _expression(number)
        if not isinstance(expression, sympy.Symbol) or expression in self._sources:
            return None
        self._sources[expression] = index, dim
        return expression

    def evaluator(self, numbers: Sequence[Number]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """A function from the inputs of a run to the values of ``numbers``.

        Raises:
            UnknownSize: a number depends on a symbol that no input shows (a size that depends on data).
        """
        expressions = [_expression(n) for n in numbers]
        if all(not isinstance(e, sympy.Basic) for e in expressions):
            constant = tuple(expressions)
            return lambda inputs: constant
        symbols = sorted({s for e in expressions if isinstance(e, sympy.Basic) for s in e.free_symbols}, key=str)
        unknown = [s for s in symbols if s not in self._sources]
        if unknown:
            raise UnknownSize(f"a size depends on data ({', '.join(map(str, unknown))})")
        sources = [self._sources[s] for s in symbols]
        function = _function(symbols, expressions)

        def evaluate(inputs: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(function(*[inputs[i] if d is None else inputs[i].shape[d] for i, d in sources]))

        floats = [s in self._floats for s in symbols]
        if not any(floats):
            return evaluate

        def evaluate_with_floats(inputs: Sequence[Any]) -> tuple[Any, ...]:
            found = [inputs[i] if d is None else inputs[i].shape[d] for i, d in sources]
            return tuple(function(*[x.item() if f else x for x, f in zip(found, floats, strict=True)]))

        return evaluate_with_floats


class _Printer(PythonCodePrinter):
    """Writes torch's functions as the calls that they are.

    Sympy goes by the name of a class: it takes torch's ``Mod`` for its own and writes ``Mod(a + 4, 12)`` as
    ``a + 4 % 12``, which is another number.
    """

    def _print(self, expr: Any, **kwargs: Any) -> str:
        if isinstance(expr, sympy.Basic) and type(expr).__name__ in _FUNCTIONS:
            return f"{type(expr).__name__}({', '.join(self._print(a) for a in expr.args)})"
        return str(super()._print(expr, **kwargs))

    def _print_Float(self, expr: sympy.Float) -> str:  # noqa: N802 - the name that sympy looks for
        """All digits; sympy writes 15."""
        return repr(float(expr))


def _function(symbols: Sequence[sympy.Symbol], expressions: Sequence[Any]) -> Callable[..., list[Any]]:
    """A Python function of the values of ``symbols`` that gives those of ``expressions``."""
    settings = {"fully_qualified_modules": False, "inline": True, "allow_unknown_functions": True}
    return sympy.lambdify(symbols, expressions, modules=[_FUNCTIONS, "math"], printer=_Printer(settings))


def _expression(number: Number) -> Any:
    """The sympy expression behind a symbolic number, or the plain number when it has no symbols."""
    if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        expression = number.node.expr
        if expression.free_symbols:
            return expression
        kind = {torch.SymInt: int, torch.SymBool: bool}.get(type(number), float)
        return kind(expression)
    return number


def is_number(node: fx.Node) -> bool:
    """Whether ``node`` is a symbolic size or scalar, not a tensor."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def hint(size: Any) -> int:
    """A size; of an open one that of the batch it was first seen with, or 1 where nobody knows."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 1
    return int(size)
