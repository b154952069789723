"""Comparisons of which Dynamo forgets the guard, or that it answers otherwise than Python; see :mod:`.dynamo_mends`.

* objects that were found to be one, or two, and bound methods that are compared;
* objects by which an entry is looked up, dates and decimal numbers that are compared;
* numbers that are compared with members of an ``IntEnum``, and by ``is`` with ``True``.
"""

from __future__ import annotations

import datetime
import decimal
import functools
import operator
import pathlib
import types
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch._C._dynamo.guards import DictGuardManager

# Private: guards have no public name.
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, _get_closure_vars, get_verbose_code_parts, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import ConstantVariable, builtin, object_protocol
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.functions import BaseUserFunctionVariable, UserMethodVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedObjectVariable

__all__ = ["COMPARISONS", "comparing", "is_value", "known", "leave_to_python", "of_numpy", "watch"]


def _guarding_identity(compare: Callable[..., Any]) -> Callable[..., Any]:
    """``a is b`` may be otherwise another time."""

    def vt_identity_compare(left: Any, right: Any) -> Any:
        answer = compare(left, right)
        if answer is not None:
            _guard_identity(left, right, answer.as_python_constant())
        return answer

    return vt_identity_compare


def comparing(call: Callable[..., Any]) -> Callable[..., Any]:
    """Comparisons of symbolic numbers with members of an ``IntEnum`` and with ``True``, and of tensors by ``is``.

    Dynamo settles these without a guard.
    """

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if len(args) != 2 or self.fn not in _OPERATORS:
            return call(self, tx, args, kwargs)
        by_identity = self.fn in (operator.is_, operator.is_not)
        kinds = [type(_peek(side)) for side in args]
        if by_identity:
            if bool in kinds:
                args = [_settled(side) for side in map(known, args)]
        elif any(issubclass(kind, (int, float)) and kind not in (int, float, bool) for kind in kinds):
            args = [_number(side) for side in map(known, args)]
        elif self.fn in (operator.eq, operator.ne):
            left, right = map(_method, args)
            if left is not None and right is not None:
                return ConstantVariable(_are_one_method(left, right) == (self.fn is operator.eq))
        result = call(self, tx, args, kwargs)
        if by_identity and all(isinstance(known(side), TensorVariable) for side in args):
            left, right = args
            _guard_identity(left, right, result.as_python_constant() == (self.fn is operator.is_))
        return result

    return call_function


class _Method(NamedTuple):
    """A bound method: its function, the object, or what stands for one that the step has made, and its source."""

    function: Any
    owner: Any
    source: Any


def _method(side: Any) -> _Method | None:
    if isinstance(_peek(side), (int, float, str, torch.Tensor)):
        return None
    variable = known(side)
    if isinstance(variable, UserMethodVariable):
        owner = known(variable.obj)
        return _Method(variable.fn, getattr(owner, "value", owner) if owner.source else owner, owner.source)
    value, source = _value_of(variable), variable.source
    if not isinstance(value, types.MethodType) or source is None:
        return None
    install_guard(AttrSource(source, "__func__").make_guard(GuardBuilder.ID_MATCH))
    return _Method(value.__func__, value.__self__, AttrSource(source, "__self__"))


def _are_one_method(left: _Method, right: _Method) -> bool:
    """Dynamo compares what stands for bound methods, which are equal if their functions and their objects are one."""
    if left.function is not right.function:
        return False
    are_one = left.owner is right.owner
    _watch_identity(left.source, right.source, are_one)
    return are_one


_OPERATORS = {
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
    *(operator.is_, operator.is_not),
}


def known(variable: Any) -> Any:
    """The variable that a lazy one stands for."""
    return variable.realize() if isinstance(variable, LazyVariableTracker) else variable


def _value_of(there: Any) -> Any:
    """The object that a variable stands for, if it says so; for lists and tuples, which may hold symbols, itself."""
    return there if isinstance(there, BaseListVariable) else getattr(there, "value", None)


def of_numpy(variable: Any) -> type | None:
    """Which of NumPy's numbers a variable is marked as."""
    return getattr(known(variable), "of_numpy", None)


def leave_to_python(reason: str) -> NoReturn:
    """Break the graph."""
    unimplemented(gb_type="left to Python", context="", explanation=f"{reason} is left to Python.", hints=[])


def _peek(variable: Any) -> Any:
    """The value of a variable, if it is known without a guard."""
    if isinstance(variable, LazyVariableTracker) and not variable.is_realized():
        return variable.original_value()
    there = known(variable)
    return there.as_python_constant() if there.is_python_constant() else None


def _settled(side: Any) -> Any:
    """A truth that depends on symbols, settled with a guard."""
    is_truth = isinstance(side, SymNodeVariable) and side.python_type() is bool
    return ConstantVariable(bool(side.evaluate_expr())) if is_truth else side


def _number(side: Any) -> Any:
    """A member of an ``IntEnum``, which has a guard, as the number that it is."""
    value = side.as_python_constant() if side.is_python_constant() else None
    if isinstance(side, ConstantVariable) or not isinstance(value, (int, float)):
        return side
    return ConstantVariable(int(value) if isinstance(value, int) else float(value))


def _guard_identity(left: Any, right: Any, are_one: bool) -> None:
    first, second = [None if isinstance(k, _TOLD_APART) else k.source for k in map(known, (left, right))]
    _watch_identity(first, second, are_one)


def _watch_identity(first: Any, second: Any, are_one: bool) -> None:
    if first is not None and second is not None and first != second:
        install_guard(first.make_guard(functools.partial(_is_as_before, other=second, are_one=are_one)))


def _is_as_before(guards: GuardBuilder, guard: Any, other: Any, are_one: bool) -> None:
    code = f"{guards.arg_ref(guard)} {'is' if are_one else 'is not'} {guards.arg_ref(other.name)}"
    guards.add_python_lambda_leaf_guard_to_root([code], get_verbose_code_parts(code, guard))


_TOLD_APART = (ConstantVariable, BuiltinVariable, BaseUserFunctionVariable, UserDefinedClassVariable)
"""What guards of its own tell from others."""


def _guarding_keys(hashed: Callable[..., Any]) -> Callable[..., Any]:
    """What is looked up by an object depends on which one it is."""

    def hash_impl(self: Any, tx: Any) -> Any:
        result = hashed(self, tx)
        if self.source is not None and isinstance(self.value, types.MethodType):
            for part in ("__func__", "__self__"):
                install_guard(AttrSource(self.source, part).make_guard(GuardBuilder.ID_MATCH))
        elif self.source is not None and type(self.value).__hash__ is object.__hash__:
            install_guard(self.source.make_guard(GuardBuilder.ID_MATCH))
        _guard_value(self)
        return result

    return hash_impl


def _guarding_identity_of_keys(hashed: Callable[..., Any]) -> Callable[..., Any]:
    """The same for tensors."""

    def hash_impl(self: Any, tx: Any) -> Any:
        if self.source is not None:
            install_guard(self.source.make_guard(GuardBuilder.ID_MATCH))
        return hashed(self, tx)

    return hash_impl


def _comparing_keys(compare: Callable[..., bool]) -> Callable[..., bool]:
    """Dynamo finds keys again that are the same object, where Python asks whether they are equal."""

    def is_python_equal(self: Any, other: Any) -> bool:
        ours, theirs = self.value, _value_of(known(other))
        by_value = (*_VALUES, types.MethodType)
        if isinstance(ours, by_value) and isinstance(theirs, by_value):
            return bool(ours == theirs)
        is_equal = compare(self, other)
        if not is_equal and isinstance(type(ours).__eq__, types.FunctionType) and theirs is not None:
            leave_to_python("a key that is compared by its own __eq__")
        return is_equal

    return is_python_equal


def _guarding_values(compare: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo compares dates and the like when it makes a graph."""

    def richcompare_impl(self: Any, tx: Any, other: Any, op: str) -> Any:
        for side in (self, other):
            _guard_value(known(side))
        return compare(self, tx, other, op)

    return richcompare_impl


_VALUES = (datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, pathlib.PurePath)


def _guard_value(variable: Any) -> None:
    value = getattr(variable, "value", None)
    if isinstance(value, _VALUES) and variable.source is not None:
        install_guard(variable.source.make_guard(functools.partial(is_value, value=value)))


def watch(guards: GuardBuilder, guard: Any, holds: Callable[[Any], bool], words: str) -> None:
    """Have a graph go on only where ``holds`` says so of what there is then.

    Args:
        guards: what Dynamo gives to a function of a guard.
        guard: the same.
        holds: asked at each call.
        words: the condition for a log, with ``{}`` for what there is.
    """
    name, manager = guards.arg_ref(guard), guards.get_guard_manager(guard)
    told = get_verbose_code_parts(words.replace("{}", name, 1), guard)
    if isinstance(manager, DictGuardManager):  # it takes no guards of the dictionary as a whole
        guards.add_python_lambda_leaf_guard_to_root(
            [f"___holds({name})"], told, {"___holds": holds, **_get_closure_vars()}
        )
    else:
        manager.add_lambda_guard(holds, told, guard.user_stack)


def is_value(guards: GuardBuilder, guard: Any, value: Any) -> None:
    """Guard that there is an equal value of the same type."""
    watch(guards, guard, lambda now: type(now) is type(value) and now == value, f"{{}} == {value!r}")


COMPARISONS: list[tuple[Any, str, Callable[..., Callable[..., Any]]]] = [
    (UserDefinedObjectVariable, "hash_impl", _guarding_keys),
    (TensorVariable, "hash_impl", _guarding_identity_of_keys),
    (UserDefinedObjectVariable, "is_python_equal", _comparing_keys),
    (UserDefinedObjectVariable, "richcompare_impl", _guarding_values),
    (UserDefinedObjectVariable, "tp_richcompare_impl", _guarding_values),  # its name from torch 2.14 on
    *((owner, "vt_identity_compare", _guarding_identity) for owner in (builtin, object_protocol)),
]
"""Functions of Dynamo by their owners, and what makes the one that takes their place; a torch has one of each name."""
