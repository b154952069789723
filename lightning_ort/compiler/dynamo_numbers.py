"""What Dynamo computes of numbers that change: functions of :mod:`math`, operators, ``int``, ``min`` and the like.

Where Python has an error, of a division by zero say, a graph made for another number would go on with infinity or NaN;
and where Python has an integer of more than 64 bits, a graph has another one. That neither is so becomes an assumption
of the graph; else Python computes. Numbers as arguments of operators whose gradients would settle them become tensors.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

# Private: Dynamo has no public way to compute a call otherwise.
from torch._dynamo.source import TensorPropertySource
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._subclasses.fake_tensor import FakeTensor

from lightning_ort.compiler.dynamo_comparisons import known, of_numpy
from lightning_ort.compiler.exact_floats import IN_GRAPHS

__all__ = ["as_tensors", "computing", "taking_functions"]

_BITS = 62
_MOST = float(1 << _BITS)
_LARGEST_EXPONENT = 709.0
_DOMAINS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("exp", "expm1"), lambda x: x < _LARGEST_EXPONENT),
    **dict.fromkeys(("sinh", "cosh"), lambda x: abs(x) < _LARGEST_EXPONENT),
    "exp2": lambda x: x < sys.float_info.max_exp,
    **dict.fromkeys(("log", "log2", "log10", "lgamma"), lambda x: x > 0),
    "log1p": lambda x: x > -1,
    "sqrt": lambda x: x >= 0,
    **dict.fromkeys(("asin", "acos"), lambda x: abs(x) <= 1),
    "acosh": lambda x: x >= 1,
    "atanh": lambda x: abs(x) < 1,
    **dict.fromkeys(("floor", "ceil", "trunc"), lambda x: abs(x) < _MOST),
}
"""Name of a function of ``math`` to where it has a value."""


def taking_functions(call: Callable[..., Any]) -> Callable[..., Any]:
    """``math.exp`` of a number that changes is in a graph: Dynamo would compile anew for each of its values."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is torch.arange:  # how long it is depends on floats in a way that no graph has
            args, kwargs = [*map(_settled_float, args)], {k: _settled_float(v) for k, v in kwargs.items()}
        if getattr(self.value, "__module__", None) != "math" or len(args) != 1 or kwargs or not _changes(args[0]):
            return call(self, tx, args, kwargs)
        there, name = known(args[0]), self.value.__name__
        if name in _DOMAINS and not _DOMAINS[name](there.sym_num):
            return call(self, tx, [_settled(there)], kwargs)
        function = IN_GRAPHS.get(name)
        if function is None:
            return call(self, tx, args, kwargs)
        proxy = tx.output.create_proxy("call_function", function, (there.as_proxy(),), {})
        return SymNodeVariable.create(tx, proxy, function(there.sym_num))

    return call_function


def computing(call: Callable[..., Any]) -> Callable[..., Any]:
    """Operators and functions of Python's numbers of which one changes.

    NumPy's divide by zero, and go round beyond 64 bits.
    """

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        check = _CHECKS.get(self.fn)
        if check is None or kwargs or not (all(map(_is_pythons, args)) and any(map(_changes, args))):
            return call(self, tx, args, kwargs)
        if all(map(_is_size, args)):
            return call(self, tx, args, kwargs)
        if self.fn in (min, max) and len({known(a).python_type() for a in args}) > 1:
            return _one_of(self.fn, args)
        if not check(*map(_value, args)):
            args = [*map(_settled, args)]
        return call(self, tx, args, kwargs)

    return call_function


def _one_of(function: Any, args: Any) -> Any:
    """The least, or the largest, of numbers of several types, with its own type; which one becomes an assumption."""
    found = args[0]
    for arg in args[1:]:
        a, b = _value(arg), _value(found)
        if a < b if function is min else a > b:
            found = arg
    return known(found)


def _has_quotient(a: Any, b: Any) -> bool:
    return bool(b != 0) and _fit(a, b)


def _has_power(base: Any, exponent: Any, *modulo: Any) -> bool:
    if exponent < 0 and base == 0:
        return False
    if modulo or not _are_whole(base, exponent) or exponent < 0:
        return _fit(base, exponent)
    if isinstance(base, int):
        return abs(base) < 2 or exponent * math.log2(abs(base)) < _BITS
    return isinstance(exponent, int) and abs(base) < 2 ** (_BITS / max(exponent, 1))


def _has_product(a: Any, b: Any) -> bool:
    if not _are_whole(a, b):
        return _fit(a, b)
    if isinstance(a, int) or isinstance(b, int):
        constant, other = (a, b) if isinstance(a, int) else (b, a)
        return bool(abs(other) < (1 << _BITS) // max(abs(constant), 1))
    return all(abs(n) < 1 << _BITS // 2 for n in (a, b))


def _has_shift(a: Any, count: Any) -> bool:
    return bool(count >= 0) and bool(count < _BITS // 2) and bool(abs(a) < 1 << _BITS // 2)


def _is_whole_of_64_bits(x: Any, *digits: Any) -> bool:
    return bool(abs(x) < _MOST)


def _fit(*numbers: Any) -> bool:
    """Whether sums of two of them have 64 bits, as a graph has for integers."""
    return all(abs(n) < 1 << _BITS for n in numbers if _are_whole(n))


def _are_whole(*numbers: Any) -> bool:
    return all(isinstance(n, (int, torch.SymInt)) for n in numbers)


def _any_number(*numbers: Any) -> bool:
    return True


_CHECKS: dict[Any, Callable[..., bool]] = {
    **dict.fromkeys((operator.truediv, operator.itruediv, operator.floordiv, operator.ifloordiv), _has_quotient),
    **dict.fromkeys((operator.mod, operator.imod, divmod), _has_quotient),
    **dict.fromkeys((operator.pow, operator.ipow, pow), _has_power),
    **dict.fromkeys((operator.lshift, operator.ilshift, operator.rshift, operator.irshift), _has_shift),
    **dict.fromkeys((operator.add, operator.iadd, operator.sub, operator.isub), _fit),
    **dict.fromkeys((operator.mul, operator.imul), _has_product),
    **dict.fromkeys((operator.and_, operator.or_, operator.xor), _fit),
    **dict.fromkeys((int, round), _is_whole_of_64_bits),
    **dict.fromkeys((min, max), _any_number),
}
"""Function of numbers to whether a graph computes it of these numbers, and of others like them, as Python does."""


def _is_pythons(variable: Any) -> bool:
    """Whether it is a number of Python's."""
    there = known(variable)
    if isinstance(there, ConstantVariable):
        return isinstance(there.value, (int, float)) and of_numpy(there) is None
    return isinstance(there, SymNodeVariable) and of_numpy(there) is None


def _changes(variable: Any) -> bool:
    """Whether it is a number that changes, and is known in the step for which a graph is made."""
    there = known(variable)
    return isinstance(there, SymNodeVariable) and there.sym_num.node.has_hint()


def _is_size(variable: Any) -> bool:
    """Whether it is a constant, or computed of sizes of tensors alone, which are far from where integers end."""
    there = known(variable)
    if not isinstance(there, SymNodeVariable):
        return abs(there.value) < 1 << _BITS // 2
    node = there.sym_num.node
    sources = [source for symbol in node.expr.free_symbols for source in node.shape_env.var_to_sources.get(symbol, ())]
    return bool(sources) and all(isinstance(source, TensorPropertySource) for source in sources)


def _value(variable: Any) -> Any:
    there = known(variable)
    return there.sym_num if isinstance(there, SymNodeVariable) else there.value


def _settled(variable: Any) -> Any:
    """What it is in this step, which becomes an assumption of the graph."""
    there = known(variable)
    return ConstantVariable.create(there.evaluate_expr()) if isinstance(there, SymNodeVariable) else there


def _settled_float(variable: Any) -> Any:
    return _settled(variable) if _changes(variable) and known(variable).python_type() is float else variable


_POSITIONS: dict[Any, int] = {
    **dict.fromkeys((operator.pow, torch.pow, "pow", "__pow__"), 1),
    **dict.fromkeys((torch.lerp, "lerp"), 2),
}
"""Function, or name of a method, to the position of the number."""
_TYPES = (torch.float32, torch.float64)
"""in which a tensor rounds a number as torch's kernels do"""


def as_tensors(region: fx.GraphModule) -> None:
    """Make a tensor of the exponent of ``x ** self.k``, and of a weight of ``lerp``, in Dynamo's graph.

    The gradient of a power asks whether its exponent is zero, and with a number that becomes an assumption: each value
    would be compiled by itself.
    """
    changed = False
    for node in list(region.graph.nodes):
        position = _POSITIONS.get(node.target) if node.op in ("call_function", "call_method") else None
        if position is None or len(node.args) <= position:
            continue
        x, number = (_example(node.args[i]) for i in (0, position))
        is_open = isinstance(number, (torch.SymFloat, torch.SymInt))
        if not is_open or not isinstance(x, FakeTensor) or x.dtype not in _TYPES:
            continue
        with region.graph.inserting_before(node):
            tensor = region.graph.call_method("new_full", (node.args[0], (), node.args[position]))
        with x.fake_mode:
            tensor.meta["example_value"] = x.new_full((), 0.0)
        if "stack_trace" in node.meta:
            tensor.meta["stack_trace"] = node.meta["stack_trace"]
        node.update_arg(position, tensor)
        changed = True
    if changed:
        region.recompile()


def _example(argument: Any) -> Any:
    return argument.meta.get("example_value") if isinstance(argument, fx.Node) else None
