"""Python's and NumPy's own values in code that Dynamo compiles.

Dynamo has stand-ins for NumPy's functions, for queues and for Python's random numbers. Some of them are other than the
real ones: sized draws come from torch's generator, numbers become arrays, a full ``deque(maxlen=...)`` keeps one entry
too many, ``random.uniform`` arrives in another type than the graph was made for. While steps are compiled, such code is
Python's, at the cost of a graph break; functions of numbers that are known when a step is compiled are computed then.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
from torch import fx

# Private: Dynamo has no public way to leave a type to Python.
from torch._dynamo.exc import unimplemented
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import RandomValueSource
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import DequeVariable
from torch._dynamo.variables.misc import NumpyVariable, RandomVariable
from torch._dynamo.variables.user_defined import OrderedDictVariable, UserDefinedClassVariable

__all__ = ["SETTINGS", "as_declared", "left_to_python"]

SETTINGS = {"trace_numpy": False}
"""Settings of ``torch._dynamo.config``: NumPy's functions get NumPy's arrays."""

_OF_NUMBERS = {np.prod, np.clip, np.round, np.float64, np.int64}
"""what is folded beside ufuncs"""
_READERS = {
    *("__bool__", "__contains__", "__eq__", "__getitem__", "__iter__", "__len__", "__ne__", "__reversed__"),
    *("copy", "count", "index"),
}
"""methods of a queue that leave it as it is"""


@contextlib.contextmanager
def left_to_python() -> Iterator[None]:
    """Have Dynamo leave to Python, meanwhile, the values that it has no faithful stand-in for."""
    wrappers = VariableBuilder._type_dispatch_impl(SETTINGS["trace_numpy"])  # by type of value
    before = {kind: wrappers.get(kind) for kind in _WRAPPERS}
    patches = [
        (NumpyVariable, "call_function", _call_numpy),
        (VariableBuilder, "wrap_unspecialized_primitive", _wrap_drawn),
        (DequeVariable, "call_method", _call_queue),
        (RandomVariable, "call_method", _call_random),
        (OrderedDictVariable, "call_method", _call_dict),
        (ConstDictVariable, "call_method", _call_dict),
        (SideEffects, "store_attr", _store_attribute),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for (owner, name, original), (_, _, make) in zip(originals, patches, strict=True):
        setattr(owner, name, make(original))
    wrappers.update(_WRAPPERS)
    try:
        yield
    finally:
        for kind, wrapper in before.items():
            if wrapper is None:
                del wrappers[kind]
            else:
                wrappers[kind] = wrapper
        for owner, name, original in originals:
            setattr(owner, name, original)


def as_declared(graph: fx.GraphModule, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, given numbers that Python's ``random`` has drawn in the type that Dynamo's ``graph`` was made for."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    drawn = [
        (i, val.dtype)
        for i, node in enumerate(placeholders)
        if isinstance(getattr(node, "_dynamo_source", None), RandomValueSource)
        and (val := node.meta["example_value"]).is_floating_point()
    ]
    if not drawn:
        return run

    def converted(*args: Any) -> Any:
        given = list(args)
        for i, dtype in drawn:
            given[i] = given[i].to(dtype)
        return run(*given)

    return converted


def _wrap_float(builder: VariableBuilder, value: np.float64) -> Any:
    """A number that NumPy has computed is a float, and no array: arrays would widen a loss, and are not logged."""
    return builder.wrap_symfloat(value.item())


def _wrap_queue(builder: VariableBuilder, value: collections.deque[Any]) -> Any:
    """A queue that exists knows how long it may be."""
    result = builder.wrap_listlike(value)
    if isinstance(result, DequeVariable):
        result.maxlen = ConstantVariable.create(value.maxlen)
    return result


_WRAPPERS: dict[Any, Callable[..., Any]] = {np.float64: _wrap_float, collections.deque: _wrap_queue}


def _break(what: str, why: str) -> NoReturn:
    unimplemented(gb_type=what, context="", explanation=why, hints=[])


def _call_numpy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Fold what is computed of constants alone, such as ``np.sqrt(width)`` and ``np.log(2 * np.pi)``."""

    def call_function(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if (isinstance(self.value, np.ufunc) or self.value in _OF_NUMBERS) and not kwargs:
            known = [a.realize() if isinstance(a, LazyVariableTracker) else a for a in args]
            if all(a.is_python_constant() for a in known):
                result = self.value(*(a.as_python_constant() for a in known))
                if isinstance(result, (np.float64, np.int64, np.bool_)):
                    return ConstantVariable.create(result.item())
        _break("a function of NumPy", f"np.{self.value.__name__} is left to NumPy.")

    return call_function


def _call_queue(original: Callable[..., Any]) -> Callable[..., Any]:
    """Break where an existing queue with a largest length changes."""

    def call_method(self: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        exists = self.source is not None and self.maxlen.as_python_constant() is not None
        if exists and name not in _READERS:
            _break("a change of a deque with maxlen", f"{name} of a deque with maxlen is left to Python.")
        return original(self, tx, name, args, kwargs)

    return call_method


def _call_random(original: Callable[..., Any]) -> Callable[..., Any]:
    """Break where an existing ``random.Random`` draws: each call of a graph would draw the same numbers."""

    def call_method(self: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if self.source is not None:
            _break("a call of a random.Random", f"{name} of a random.Random is left to Python.")
        return original(self, tx, name, args, kwargs)

    return call_method


def _call_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Break where the order of an existing dictionary changes, which would be lost."""

    def call_method(self: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if self.source is not None and name in ("move_to_end", "popitem"):
            _break("a change of order", f"{name} of a dictionary is left to Python.")
        return original(self, tx, name, args, kwargs)

    return call_method


def _store_attribute(original: Callable[..., Any]) -> Callable[..., Any]:
    """Break where an attribute of a class changes: read through an object, it would still be the one before."""

    def store_attr(self: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(owner, UserDefinedClassVariable) and owner.source is not None:
            _break("a change of a class", "an attribute of a class is left to Python.")
        return original(self, owner, *args, **kwargs)

    return store_attr


def _wrap_drawn(original: Callable[..., Any]) -> Callable[..., Any]:
    """Break where a number with a fraction is drawn: it is a float64 tensor in a graph made for float32."""

    def wrap_unspecialized_primitive(self: Any, value: Any) -> Any:
        if isinstance(value, float) and isinstance(self.get_source(), RandomValueSource):
            _break("a random number", "a random number with a fraction is left to Python.")
        return original(self, value)

    return wrap_unspecialized_primitive
