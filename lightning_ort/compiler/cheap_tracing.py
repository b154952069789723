"""What tracing need not do again and again.

Fake tensors have symbols for open sizes. With these torch computes for each of them how much memory it is and how it
lies there: some fifty operations, which take half of the time of a trace, and of which two in a hundred are new.

Most of what tracing makes lives on, or is freed when nothing refers to it any more. Looking for the rest after every
700 objects takes a tenth of the time.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any, cast

import sympy
from torch._dynamo.callback import callback_handler

# Private: the arithmetic of symbolic numbers has no public name.
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["REMEMBERED", "collecting_rarely", "collecting_rarely_in_frames"]

_OBJECTS = 50_000


def _known(sizes: ShapeEnv | None) -> dict[Any, Any] | None:
    """What was computed with these symbols, where computing them leaves nothing else behind."""
    # who writes a graph notes the operation, and then has it computed
    if sizes is None or sizes._translation_validation_enabled or get_proxy_mode() is not None:
        return None
    return cast(dict[Any, Any], vars(sizes).setdefault("_lightning_ort_known", {}))


def _remembering(compute: Callable[[SymNode, SymNode], SymNode]) -> Callable[[SymNode, SymNode], SymNode]:
    name = compute.__name__

    @functools.wraps(compute)
    def computed(self: SymNode, other: SymNode) -> SymNode:
        # floats are computed as Python does
        integers = self.pytype is int and type(other) is SymNode and other.pytype is int
        known = _known(self.shape_env) if integers else None
        if known is None:
            return compute(self, other)
        sizes = self.shape_env
        a, b = ((x._expr, x._hint, x._optimized_summation) for x in (self, other))
        of = name, a, b, sizes._replacements_version_counter
        result = known.get(of)
        if result is None:
            result = known[of] = compute(self, other)
        return result

    return computed


def _remembering_constants(wrap: Callable[[SymNode, int], SymNode]) -> Callable[[SymNode, int], SymNode]:
    @functools.wraps(wrap)
    def wrapped(self: SymNode, number: int) -> SymNode:
        known = _known(self.shape_env) if type(number) is int else None
        if known is None:
            return wrap(self, number)
        result = known.get(number)
        if result is None:
            result = known[number] = wrap(self, number)
        return result

    return wrapped


def _telling_symbols(as_int: Callable[[SymNode], int | None]) -> Callable[[SymNode], int | None]:
    @functools.wraps(as_int)
    def number(self: SymNode) -> int | None:
        expression = self.expr
        if isinstance(expression, sympy.Integer):
            return int(expression)
        # it looks through all of an expression for what is not a number; here the first symbol will do
        while expression.args:
            expression = expression.args[-1]
        return None if isinstance(expression, sympy.Symbol) else as_int(self)

    return number


_OPERATIONS = "add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "sym_min", "sym_max", "int_floordiv"
REMEMBERED: list[tuple[Any, str, Callable[..., Any]]] = [
    *((SymNode, name, _remembering) for name in _OPERATIONS if hasattr(SymNode, name)),
    (SymNode, "wrap_int", _remembering_constants),
    (SymNode, "maybe_as_int", _telling_symbols),
]
"""Methods by their owner, and what makes the ones that take their place."""


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Have Python look for garbage more rarely, for a block; if it is not to look at all, that stays so."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], _OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextlib.contextmanager
def collecting_rarely_in_frames() -> Iterator[None]:
    """The same from where Dynamo begins to compile something to its end, whenever that is in a block."""
    meanwhile = contextlib.ExitStack()

    def begin(_: Any) -> None:
        meanwhile.enter_context(collecting_rarely())

    def end(_: Any) -> None:
        meanwhile.close()

    callbacks = (callback_handler.start_callbacks, begin), (callback_handler.end_callbacks, end)
    for registered, callback in callbacks:
        registered.append(callback)
    try:
        yield
    finally:
        for registered, callback in callbacks:
            if callback in registered:  # torch.compiler.reset clears them
                registered.remove(callback)
        meanwhile.close()
