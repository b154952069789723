"""Changes of containers that Dynamo loses, and operators that it computes otherwise than Python.

The graph ends before such a change or operator, and Python makes it.
"""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, NoReturn

import numpy as np

# Private: what Dynamo knows of values has no public form.
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import break_graph_if_unsupported
from torch._dynamo.variables import ConstantVariable, user_defined
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.iter import ItertoolsVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import BaseListVariable, DequeVariable
from torch._dynamo.variables.misc import NumpyVariable
from torch._dynamo.variables.sets import SetVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.user_defined import (
    UserDefinedClassVariable,
    UserDefinedListVariable,
    UserDefinedObjectVariable,
    UserDefinedSetVariable,
)

from lightning_ort.compiler.dynamo_comparisons import known, leave_to_python
from lightning_ort.compiler.dynamo_contents import INSTRUCTIONS

__all__ = ["CHANGES", "LOST_CHANGES", "changing"]

_IN_PLACE = {
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow),
    *(operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.imatmul),
}
_BINARY = {operator.add, operator.sub, operator.mul, operator.and_, operator.or_, operator.xor}

_REMAINDERS = {operator.mod, operator.imod, operator.floordiv, operator.ifloordiv, divmod}
_ASKING = {isinstance, type, hasattr, getattr, callable, id, operator.is_, operator.is_not}
"""what tells of an array no more than what it is, or guards it"""


def changing(call: Callable[..., Any]) -> Callable[..., Any]:
    """``a += b`` and the like, of a list, a set or what a class of the user's has made of one; sums of others; ``del``;
    and whatever is computed of arrays."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        in_place = self.fn in _IN_PLACE
        # an attribute may not be there another time
        goes = self.fn is delattr and known(args[0]).source is not None
        if any(map(_is_array, args)) and self.fn not in _ASKING:
            leave_to_python(f"{self.fn.__name__} of an array of NumPy's")
        if self.fn not in _ASKING and any(_computes_otherwise(known(a)) for a in args):
            _leave(self, args)
        # the arithmetic of symbols takes such a remainder for a whole number
        if self.fn in _REMAINDERS and _is_float_that_changes(args):
            leave_to_python(f"{self.fn.__name__} of a float that changes")
        if goes or (in_place and len(args) == 2 and _is_lost(self.fn, *map(known, args))):
            _leave(self, args)
        if self.fn is operator.mul and any(_is_limited(known(a)) for a in args):
            _leave(self, args)
        # of a number that changes, the digits are not heeded; of a constant, how it is to be written is not
        if self.fn is round and len(args) == 2 and _is_open(known(args[0]), int):
            leave_to_python("round to a number of digits")
        if self.fn is format and len(args) == 2:
            leave_to_python("format with a specification")
        result = call(self, tx, args, kwargs)
        if (in_place or self.fn in _BINARY) and _is_no_answer(result):
            _leave(self, args)
        return result

    return call_function


def _breaking_at_operators(run: Callable[..., None]) -> Callable[..., None]:
    """Have a graph end, and another begin behind it, where an operator is left to Python: else all that follows is."""
    breaking = break_graph_if_unsupported(push=True, msg_prefix="an operator between objects")(run)

    def binary_op(self: Any, instruction: Any) -> None:
        both = self.stack[-2:]
        (breaking if any(map(_is_object, both)) or _is_float_that_changes(both) else run)(self, instruction)

    return binary_op


def _is_object(variable: Any) -> bool:
    there = known(variable)
    return _is_array(there) or _is_open(there, float) or isinstance(there, (SetVariable, UserDefinedObjectVariable))


_CONSTANTS: Any = getattr(user_defined, "UserDefinedConstantVariable", ())
_MAKING = {
    "__doc__", "__getnewargs__", "__getstate__", "__hash__", "__init__", "__new__", "__reduce__", "__reduce_ex__",
}  # fmt: skip


def _computes_otherwise(there: Any) -> bool:
    """Whether it is of a class of ``int``, ``float`` or ``str`` with operators of its own, which Dynamo passes over."""
    if not isinstance(there, _CONSTANTS):
        return False
    kind = there.python_type()
    own = {name for cls in kind.__mro__ if cls.__flags__ & _HEAP_TYPE for name in cls.__dict__}
    plain = next((base for base in (int, float, str) if issubclass(kind, base)), object)
    return not own.intersection(dir(plain)) <= _MAKING


def _is_open(there: Any, kind: type) -> bool:
    """Whether it is a number of that type that changes."""
    return isinstance(there, SymNodeVariable) and there.python_type() is kind


def _is_float_that_changes(args: Any) -> bool:
    """Whether what is computed of these numbers is one."""
    there = [*map(known, args)]
    is_open = any(_is_open(a, float) or _is_open(a, int) for a in there)
    return is_open and any(_is_open(a, float) or type(getattr(a, "value", None)) is float for a in there)


def _leave(function: Any, args: Any) -> NoReturn:
    leave_to_python(f"{function.fn.__name__} of a {known(args[0]).python_type_name()}")


def _is_lost(function: Callable[..., Any], changed: Any, other: Any) -> bool:
    if isinstance(changed, (UserDefinedListVariable, UserDefinedSetVariable)):
        return True
    if isinstance(changed, SetVariable):  # it would be another one
        return function is operator.isub
    # arrays and others have an addition of their own, which comes before that of lists
    return isinstance(changed, BaseListVariable) and not isinstance(other, (BaseListVariable, ConstDictVariable))


def _is_array(variable: Any) -> bool:
    if isinstance(variable, LazyVariableTracker) and not variable.is_realized():
        return isinstance(variable.original_value(), np.ndarray)
    return isinstance(known(variable), NumpyVariable) and isinstance(known(variable).value, np.ndarray)


def _is_no_answer(result: Any) -> bool:
    there = known(result)
    return bool(there.is_python_constant()) and there.as_python_constant() is NotImplemented


_READERS_OF_QUEUES = {
    *("__bool__", "__contains__", "__eq__", "__getitem__", "__iter__", "__len__", "__ne__", "__reversed__"),
    *("count", "index"),
}
"""methods of a queue that leave it as it is, and make no other"""
_CHANGES_OF_SETS = {
    *("add", "clear", "discard", "pop", "remove", "update"),
    *("difference_update", "intersection_update", "symmetric_difference_update"),
}
_COPIES = {"copy", "__copy__", "__add__"}
"""those that make another one, which would have no ``maxlen``"""
_REDUCING = ("__reduce__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")
"""methods by which a class says what ``copy`` and ``pickle`` make of an object"""
_HEAP_TYPE = 1 << 9
"""Python's flag of classes that are written in Python"""


def _is_limited(variable: Any) -> bool:
    return isinstance(variable, DequeVariable) and variable.maxlen.as_python_constant() is not None


def _queue_changes(queue: Any, tx: Any, name: str, *_: Any) -> str | None:
    lost = _is_limited(queue) and (queue.source is not None or name in _COPIES)
    return f"{name} of a deque with maxlen" if lost and name not in _READERS_OF_QUEUES else None


def _set_changes(instance: Any, tx: Any, name: str, *_: Any) -> str | None:
    """Nothing writes them back."""
    changes = instance.source is not None and name in _CHANGES_OF_SETS
    return f"{name} of a {instance.python_type_name()}" if changes else None


def _order_changes(dictionary: Any, tx: Any, name: str, *_: Any) -> str | None:
    """The order would be lost, or the class of a copy."""
    changes = dictionary.source is not None and name in ("move_to_end", "popitem")
    is_copied = name == "copy" and dictionary.python_type() not in (dict, OrderedDict)
    return f"{name} of a dictionary" if changes or is_copied else None


def _copies(instance: Any, tx: Any, name: str, *_: Any) -> str | None:
    """What ``copy`` makes would have the ``__dict__`` alone: no entries, and nothing of what the class says of how an
    object of it is to be made."""
    if name != "__reduce_ex__":
        return None
    kind = instance.python_type()
    plain = all(cls.__flags__ & _HEAP_TYPE and not cls.__dict__.get("__slots__") for cls in kind.__mro__[:-1])
    plain = plain and all(getattr(kind, method, None) is getattr(object, method, None) for method in _REDUCING)
    return None if plain else f"a copy of a {kind.__name__}"


_ALGEBRA = {"difference", "intersection", "isdisjoint", "symmetric_difference", "union"}


def _used_up(own: Any, tx: Any, name: str, args: Any, *_: Any) -> str | None:
    """Dynamo looks into an iterator to see whether its entries are hashable, and finds nothing in it then."""
    lasting = (BaseListVariable, ConstDictVariable, SetVariable, ConstantVariable)
    is_used_up = name in _ALGEBRA and not all(isinstance(known(a), lasting) for a in args)
    return f"{name} of a set with what may be an iterator" if is_used_up else None


def _past_classes(function: Any, *_: Any) -> str | None:
    """``object.__setattr__(module, name, layer)`` would register the layer: Dynamo takes what tensors have of
    ``object`` for a method of theirs, and calls the one that is in its place."""
    is_of_object = getattr(function.value, "__objclass__", None) is object
    return f"object.{function.value.__name__}" if is_of_object else None


def _endless(function: Any, tx: Any, args: Any, kwargs: Any) -> str | None:
    """A number of times that is named is not seen."""
    return "itertools.repeat with times=" if function.value is itertools.repeat and kwargs else None


def _new_sets(kind: Any, *_: Any) -> str | None:
    """One that outlives the step would be empty."""
    return f"a {kind.value.__name__}, a set of a class of its own," if issubclass(kind.value, set) else None


def _class_changes(effects: Any, owner: Any, *_: Any) -> str | None:
    """Read through an object, the attribute would still be the one before."""
    changes = isinstance(owner, UserDefinedClassVariable) and owner.source is not None
    return "an attribute of a class" if changes else None


def _is_own_dictionary(effects: Any, owner: Any, name: str, value: Any, *_: Any) -> str | None:
    """``self.__dict__ = self``: entries would no longer be attributes, and attributes no entries."""
    return "an object that is its own __dict__" if name == "__dict__" and known(value) is owner else None


def _was_own_dictionary(effects: Any, found: Any, *_: Any) -> str | None:
    return "an object that is its own __dict__" if getattr(found, "__dict__", None) is found else None


def _filled(kind: Any, tx: Any, args: Any, kwargs: Any) -> str | None:
    """``OrderedDict.__init__`` calls ``__setitem__``: what one of the class's own does besides would be lost.

    That of a dataclass is called by code that Dynamo follows.
    """
    own = kind.value
    calls = issubclass(own, OrderedDict) and own.__setitem__ is not OrderedDict.__setitem__ and (args or kwargs)
    return f"a {own.__name__}, filled by a __setitem__ of its own," if calls and not is_dataclass(own) else None


CHANGES: list[tuple[Any, str, Callable[..., Callable[..., Any]]]] = [
    (INSTRUCTIONS, "BINARY_OP", _breaking_at_operators)
]
"""Functions of Dynamo by their owners, and what makes the one that takes their place."""
LOST_CHANGES: list[tuple[type, str, Callable[..., str | None]]] = [
    (DequeVariable, "call_method", _queue_changes),
    (UserDefinedSetVariable, "call_method", _set_changes),
    (user_defined.OrderedDictVariable, "call_method", _order_changes),
    (ConstDictVariable, "call_method", _order_changes),
    (SetVariable, "call_method", _used_up),
    (ItertoolsVariable, "call_function", _endless),
    (TorchInGraphFunctionVariable, "call_tensor_method", _past_classes),
    (UserDefinedObjectVariable, "call_method", _copies),
    (UserDefinedSetVariable, "call_method", _copies),
    (UserDefinedClassVariable, "call_function", _new_sets),
    (UserDefinedClassVariable, "call_function", _filled),
    (SideEffects, "store_attr", _class_changes),
    (SideEffects, "store_attr", _is_own_dictionary),
    (SideEffects, "track_object_existing", _was_own_dictionary),
]
"""Methods of Dynamo, and what says whether a call of one is to be a graph break, by the call's arguments."""
