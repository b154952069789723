"""What Dynamo reads of containers, and writes into texts, without a guard; see :mod:`.dynamo_mends`.

* the keys of a dictionary and their order, the order of a set, and a range that is unpacked as arguments;
* texts, by ``str``, ``repr``, ``format``, ``%`` and f-strings, of objects, classes and numbers that change.
"""

from __future__ import annotations

import dis
import functools
import operator
from collections.abc import Callable
from typing import Any

# Private: guards have no public name.
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.symbolic_convert import (
    InliningGeneratorInstructionTranslator,
    InliningInstructionTranslator,
    InstructionTranslator,
    InstructionTranslatorBase,
)
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import BaseUserFunctionVariable
from torch._dynamo.variables.lazy import LazySymNodeFormatString, LazyVariableTracker
from torch._dynamo.variables.lists import BaseListVariable, ListVariable, RangeVariable, TupleVariable
from torch._dynamo.variables.misc import NumpyVariable
from torch._dynamo.variables.sets import SetVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable, SymNodeVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedObjectVariable

from lightning_ort.compiler.dynamo_comparisons import known, leave_to_python, of_numpy, watch

__all__ = ["CONTENTS", "INSTRUCTIONS", "writing"]


def _guarding_order(install: Callable[..., None]) -> Callable[..., None]:
    """Whoever asks for all keys gets them in their order."""

    def install_dict_keys_match_guard(self: Any) -> None:
        install(self)
        if self.source:
            InstructionTranslator.current_tx().output.guard_on_key_order.add(self.source)

    return install_dict_keys_match_guard


def _guarding_keys_of_constants(convert: Callable[..., Any]) -> Callable[..., Any]:
    """A dictionary of constants as one, such as the empty one whose truth is asked."""

    def as_python_constant(self: Any) -> Any:
        constant = convert(self)
        self.install_dict_keys_match_guard()
        return constant

    return as_python_constant


def _guarding_what_is_listed(call: Callable[..., Any]) -> Callable[..., Any]:
    """``list(keys)``, ``[*keys]`` and ``names.extend(keys)`` of a dictionary or a set."""

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        there = known(args[0]) if name == "extend" and len(args) == 1 else None
        if isinstance(there, ConstDictVariable):
            there.install_dict_keys_match_guard()
        if isinstance(there, SetVariable):
            _order_as_python(there)
        return call(self, tx, name, args, kwargs)

    return call_method


def _in_pythons_order(read: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, tx: Any) -> Any:
        _order_as_python(self)
        return read(self, tx)

    return method


def _order_as_python(entries: SetVariable) -> None:
    """Dynamo has the entries of a set that a step makes in the order in which they came."""
    keys = list(entries.items)
    if entries.source is not None or entries.python_type() not in (set, frozenset):
        return
    if not all(key.vt.is_python_constant() for key in keys):
        return
    by_value = {key.vt.as_python_constant(): key for key in keys}
    if len(by_value) == len(keys):
        given = dict(entries.items)
        entries.items.clear()
        in_order = list(by_value)  # a set that is made of a dictionary has another order
        entries.items.update((by_value[value], given[by_value[value]]) for value in set(in_order))


def _unpacking_range(call: Callable[..., None]) -> Callable[..., None]:
    """``function(*steps)`` of a range, which Dynamo takes for the three numbers that it is made of."""

    def call_function_ex(self: Any, instruction: Any) -> None:
        for i, variable in enumerate(self.stack[-2:], max(0, len(self.stack) - 2)):
            if isinstance(there := known(variable), RangeVariable):
                self.stack[i] = TupleVariable(there.unpack_var_sequence(self))
        call(self, instruction)

    return call_function_ex


def _formatting(write: Callable[..., None]) -> Callable[..., None]:
    """``f"{number}"`` of a number that changes, for which Dynamo has that number, and no text."""

    def format_value(self: Any, specification: Any, flags: int) -> None:
        number = known(self.stack[-1])
        if of_numpy(number) is not None:
            _watch_text(number)
        if not isinstance(number, SymNodeVariable):
            write(self, specification, flags)
            return
        self.pop()
        if flags & _CONVERSIONS:  # it is a text that is written as specified, and the same one by all of them
            self.push(ConstantVariable(str(number.evaluate_expr())))
            write(self, specification, flags & ~_CONVERSIONS)
        else:
            self.push(LazyVariableTracker.create(LazySymNodeFormatString(number, specification), source=None))

    return format_value


_CONVERSIONS = 0x03
"""what an f-string says of ``!s``, ``!r`` and ``!a`` (:func:`dis.dis`, ``FORMAT_VALUE``)"""


def _of_numbers(write: Callable[..., str]) -> Callable[..., str]:
    """Dynamo writes the number without the specification first, which is for numbers, and may be none for texts."""
    return lambda self: str(self.fmt_var.as_python_constant().format(self.sym_node_var.evaluate_expr()))


def writing(call: Callable[..., Any]) -> Callable[..., Any]:
    """``text % values``, ``text.format(...)``, ``format`` and f-strings write what is known when a graph is made.

    And so says ``not`` of a dictionary whether it is empty.
    """

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn in (str.format, format) or (self.fn in _MODULO and _is_text(args[0])):
            template, *values = args
            args = [template, *map(_written, values)]
            kwargs = {name: _written(value) for name, value in kwargs.items()}
        elif self.fn in (str, repr, ascii) and len(args) == 1:
            _watch_text(known(args[0]))
        elif self.fn is operator.not_ and isinstance(there := known(args[0]), ConstDictVariable):
            there.install_dict_keys_match_guard()
        return call(self, tx, args, kwargs)

    return call_function


_MODULO = (operator.mod, operator.imod)


def _is_text(variable: Any) -> bool:
    there = known(variable)
    return isinstance(there, ConstantVariable) and isinstance(there.value, str)


def _written(variable: Any) -> Any:
    """``variable`` with the numbers that it has now, and with guards for what else its text depends on."""
    there = known(variable)
    if type(there) is TupleVariable:
        return TupleVariable([_written(item) for item in there.items])
    if isinstance(there, SymNodeVariable) and of_numpy(there) is None:
        return ConstantVariable(there.evaluate_expr())
    _watch_text(there)
    return there


def _watch_text(there: Any) -> None:
    if of_numpy(there) is not None or isinstance(there, (NumpyNdarrayVariable, NumpyVariable)):
        leave_to_python("the text of an array or of a number of NumPy's")
    if isinstance(there, SymNodeVariable):
        there.evaluate_expr()  # which guards it
    elif isinstance(there, BaseListVariable):
        for item in there.items:
            _watch_text(known(item))
    elif isinstance(there, ConstDictVariable):
        there.install_dict_keys_match_guard()
        for value in there.items.values():
            _watch_text(known(value))
    elif there.source is not None and isinstance(there, (UserDefinedClassVariable, BaseUserFunctionVariable)):
        install_guard(there.source.make_guard(GuardBuilder.ID_MATCH))
    elif there.source is not None and isinstance(there, UserDefinedObjectVariable):
        texts = str(there.value), repr(there.value)
        install_guard(there.source.make_guard(functools.partial(_has_texts, texts=texts)))


def _has_texts(guards: GuardBuilder, guard: Any, texts: tuple[str, str]) -> None:
    watch(guards, guard, lambda now: (str(now), repr(now)) == texts, f"str({{}}) == {texts[0]!r}")


class _Instructions:
    """Has what translates an instruction of Python's under its name, in the tables of all kinds of functions."""

    _kinds = (InstructionTranslator, InliningInstructionTranslator, InliningGeneratorInstructionTranslator)

    def __getattr__(self, name: str) -> Any:
        if name not in dis.opmap:  # another version of Python has it
            raise AttributeError(name)
        return self._kinds[0].dispatch_table[dis.opmap[name]]

    def __setattr__(self, name: str, function: Callable[..., None]) -> None:
        for kind in self._kinds:
            kind.dispatch_table[dis.opmap[name]] = function


INSTRUCTIONS = _Instructions()
CONTENTS: list[tuple[Any, str, Callable[..., Callable[..., Any]]]] = [
    (ConstDictVariable, "install_dict_keys_match_guard", _guarding_order),
    (ConstDictVariable, "as_python_constant", _guarding_keys_of_constants),
    (ListVariable, "call_method", _guarding_what_is_listed),
    (LazySymNodeFormatString, "__repr__", _of_numbers),
    (SetVariable, "tp_iter_impl", _in_pythons_order),
    (SetVariable, "unpack_var_sequence", _in_pythons_order),
    (InstructionTranslatorBase, "_format_value", _formatting),
    (INSTRUCTIONS, "CALL_FUNCTION_EX", _unpacking_range),
]
"""Functions of Dynamo by their owners, and what makes the one that takes their place."""
