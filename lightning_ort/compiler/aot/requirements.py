"""What the operators of a graph require of the sizes of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from lightning_ort.compiler.aot.forward import Region, run_fake
from lightning_ort.compiler.aot.inputs import HINTS, InputInfo
from lightning_ort.compiler.aot.sizes import Size, size_text, varying

__all__ = ["required_sizes"]

_QUESTIONS = 30
"""how many questions whether two sizes are equal are answered by yes because no led to an error"""


def required_sizes(region: Region, infos: Sequence[InputInfo]) -> dict[str, Size]:
    """What some of the sizes that vary have to be: a number, another one of them, or an expression of others.

    ``region`` is traced forward with sizes that have no value. torch's operators note what they require of those; of
    two sizes that must be equal, the later one is given in terms of the earlier one. What holds for no operator after
    one that cannot be traced so is not found.

    Args:
        region: the forward graph.
        infos: its inputs.
    """
    equal: list[sympy.Expr] = []
    found = _traced(region, infos, equal)
    while found.error and found.sizes.asked and len(equal) < _QUESTIONS:
        # a module compares sizes itself, and raises an error of its own where they differ
        again = _traced(region, infos, [*equal, found.sizes.asked[-1]])
        if again.error and again.mode.calls <= found.mode.calls:
            break
        equal.append(found.sizes.asked[-1])
        found = again
    return found.solved(equal)


class _Sizes(ShapeEnv):
    """Sizes without values. Questions that only a value answers are answered by an example of large, distinct ones.

    Attributes:
        asked: differences that were asked to be zero, and were not, in order.
        known: differences that had to be zero before a size was first wanted as a number and an example was given.
    """

    def __init__(self, equal: Sequence[sympy.Expr]) -> None:
        super().__init__()
        self._equal, self._examples = set(equal), dict[sympy.Symbol, int]()
        self.asked: list[sympy.Expr] = []
        self.known: list[sympy.Expr] | None = None

    def equations(self) -> list[sympy.Expr]:
        """Differences that have to be zero."""
        noted = [a.expr for some in self.deferred_runtime_asserts.values() for a in some]
        found = [sympy.expand(e.lhs - e.rhs) for e in noted if isinstance(e, sympy.Eq)]
        return [*found, *(symbol - value for symbol, value in self.replacements.items())]

    def example(self, symbol: sympy.Symbol) -> int:
        return self._examples.setdefault(symbol, HINTS[1][len(self._examples) % len(HINTS[1])])

    def evaluate_expr(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> sympy.Basic:
        try:
            return super().evaluate_expr(orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            expression = self.simplify(orig_expr)
            if not isinstance(expression, (sympy.logic.boolalg.BooleanFunction, sympy.core.relational.Relational)):
                if not expression.free_symbols or not expression.is_integer:
                    raise
                self.known = self.equations() if self.known is None else self.known
                return sympy.Integer(int(expression.xreplace({s: self.example(s) for s in expression.free_symbols})))
            return sympy.true if self._answer(expression) else sympy.false

    def _answer(self, expression: sympy.Basic) -> bool:
        if isinstance(expression, (sympy.Eq, sympy.Ne)):
            difference = sympy.expand(expression.lhs - expression.rhs)
            same = difference in self._equal or -difference in self._equal
            if not same:
                same = difference.xreplace({s: self.example(s) for s in difference.free_symbols}) == 0
                if not same:
                    self.asked.append(difference)
            return same == isinstance(expression, sympy.Eq)
        return bool(expression.xreplace({s: self.example(s) for s in expression.free_symbols}))


class _Mode(FakeTensorMode):
    """Counts operators, which tells how far a trace has come."""

    calls = 0

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if func == torch.ops.aten.nll_loss2d_forward.default:
            # what torch's kernel checks, and its shape function does not
            scores, classes = args[0].shape, args[1].shape
            for size, same in zip((scores[0], *scores[2:]), classes, strict=True):
                torch._check(size == same)
        return super().dispatch(func, types, args, kwargs)


class _Attempt:
    def __init__(self, infos: Sequence[InputInfo], equal: Sequence[sympy.Expr]) -> None:
        self.sizes = _Sizes(equal)
        self.mode = _Mode(shape_env=self.sizes, allow_non_fake_inputs=True)
        self.error = False
        made = {name: self.sizes.create_unbacked_symint() for name in varying(infos)}
        self.symbols = {name: size.node.expr for name, size in made.items()}
        for size in made.values():
            torch._check(size >= 2)
        with self.mode:
            self.inputs = [
                torch.empty([made[s] if isinstance(s, str) else s for s in i.shape], dtype=i.dtype) for i in infos
            ]

    def solved(self, equal: Sequence[sympy.Expr]) -> dict[str, Size]:
        """The equations that were noted, each solved for the last name that it can be solved for."""
        order = list(self.symbols.values())
        equations = [*equal, *self.sizes.equations()]
        if self.sizes.known is not None:
            # an example may be in them, but not where two sizes alone are equal
            equations = [*self.sizes.known, *(e for e in equations if _is_pair(e))]
        values: dict[sympy.Symbol, sympy.Expr] = {}
        progress = True
        while progress:
            progress = False
            for equation in equations:
                left = sympy.expand(equation.xreplace(values))
                if not left.free_symbols or not left.free_symbols <= set(order):
                    continue
                symbol, value = _solution(left, order)
                if symbol is not None:
                    values = {s: sympy.expand(v.xreplace({symbol: value})) for s, v in values.items()}
                    values[symbol] = value
                    progress = True
        names = {str(s): n for n, s in self.symbols.items()}
        by_name = {names[str(s)]: v for s, v in values.items()}
        return {n: int(v) if v.is_number else size_text(v, names) for n, v in by_name.items()}


def _is_pair(zero: sympy.Expr) -> bool:
    """Whether ``zero`` is the difference of two symbols."""
    return (
        zero.is_Add
        and sorted(map(str, zero.as_coefficients_dict().values())) == ["-1", "1"]
        and all(s.is_Symbol for s in zero.as_coefficients_dict())
    )


def _solution(zero: sympy.Expr, order: Sequence[sympy.Symbol]) -> tuple[sympy.Symbol | None, sympy.Expr]:
    """The last of ``order`` that is whole wherever the others are, if ``zero`` is 0, and what it is."""
    for symbol in reversed(order):
        factor = zero.coeff(symbol)
        rest = sympy.expand(zero - factor * symbol)
        if not factor.is_Integer or not factor or symbol in rest.free_symbols:
            continue
        value = sympy.expand(-rest / factor)
        if all(c.is_Integer for c in value.as_coefficients_dict().values()) and not (value.is_number and value < 0):
            return symbol, value
    return None, sympy.S.Zero


def _traced(region: Region, infos: Sequence[InputInfo], equal: Sequence[sympy.Expr]) -> _Attempt:
    attempt = _Attempt(infos, equal)
    tensors = [attempt.mode.from_tensor(t.detach(), static_shapes=True) for t in region.tensors.values()]
    try:
        run_fake(region, attempt.mode, [*tensors, *attempt.inputs])
    except Exception:
        # whatever a module raises where sizes do not fit; what was found until then counts
        attempt.error = True
    return attempt
