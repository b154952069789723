"""What Dynamo computes of numbers that change: functions of :mod:`math`, quotients and powers.

Where Python has an error, of a division by zero say, a graph made for another number would go on with infinity or NaN.
That there is none becomes an assumption of the graph; else Python computes, and raises.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

# Private: Dynamo has no public way to compute a call otherwise.
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from lightning_ort.compiler.dynamo_comparisons import known, of_numpy
from lightning_ort.compiler.exact_floats import IN_GRAPHS

__all__ = ["dividing", "taking_functions"]

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
}
"""Name of a function of ``math`` to where it has a value."""
_DIVISIONS = {
    *(operator.truediv, operator.itruediv, operator.floordiv, operator.ifloordiv, operator.mod, operator.imod, divmod),
}
_POWERS = {operator.pow, operator.ipow, pow}


def taking_functions(call: Callable[..., Any]) -> Callable[..., Any]:
    """``math.exp`` of a number that changes is in a graph: Dynamo would compile anew for each of its values."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
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


def dividing(call: Callable[..., Any]) -> Callable[..., Any]:
    """Quotients, and powers, of numbers of which a divisor, or a base, changes and is zero another time.

    Of NumPy's numbers those are infinite, and no error.
    """

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        is_quotient = self.fn in _DIVISIONS
        if (is_quotient or self.fn in _POWERS) and len(args) == 2 and all(map(_is_pythons, args)):
            divisor, other = (args[1], None) if is_quotient else args
            if _changes(divisor) and (other is None or _value(other) < 0) and known(divisor).sym_num == 0:
                args = [*map(_settled, args)]
        return call(self, tx, args, kwargs)

    return call_function


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


def _value(variable: Any) -> Any:
    there = known(variable)
    return there.sym_num if isinstance(there, SymNodeVariable) else there.value


def _settled(variable: Any) -> Any:
    """What it is in this step, which becomes an assumption of the graph."""
    there = known(variable)
    return ConstantVariable.create(there.evaluate_expr()) if isinstance(there, SymNodeVariable) else there
