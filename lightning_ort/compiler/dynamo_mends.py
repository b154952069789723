"""Errors of Dynamo's that are mended while steps are compiled.

A graph is taken again as long as its guards hold, and of some values Dynamo forgets the guard: a step would go on with
the graph of another one. They get guards here:

* objects that are read by a global name first and by an attribute then, such as a member of an ``Enum`` that chooses
  from a dictionary;
* what is compared, in :mod:`.dynamo_comparisons`, what is in containers and texts, in :mod:`.dynamo_contents`; in
  :mod:`.dynamo_changes`, containers that are changed;
* attributes and entries that were found missing, as by ``try: ... except AttributeError``, also of functions;
* methods of classes, which may be replaced by others, and what ``isinstance`` says of a ``Protocol``;
* what ``os.getenv`` finds;
* numbers with a fraction that change, and are infinite in another step; how they are computed is in
  :mod:`.exact_floats`.
"""

from __future__ import annotations

import abc
import functools
import inspect
import logging
import math
import types
from collections.abc import Callable
from typing import Any

from torch import nn

# Private: guards have no public name.
from torch._dynamo import convert_frame
from torch._dynamo import guards as dynamo_guards
from torch._dynamo.exc import ObservedAttributeError, ObservedKeyError
from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts, install_guard
from torch._dynamo.source import ConstDictKeySource, SkipGuardSource, TypeDictSource, is_from_local_source
from torch._dynamo.symbolic_convert import InliningInstructionTranslator, InstructionTranslator
from torch._dynamo.variables import ConstantVariable, builder, functions
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.dicts import ConstDictVariable, DunderDictVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.misc import PythonModuleVariable
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedObjectVariable

from lightning_ort.compiler.cheap_tracing import REMEMBERED
from lightning_ort.compiler.dynamo_changes import CHANGES
from lightning_ort.compiler.dynamo_comparisons import COMPARISONS, known, watch
from lightning_ort.compiler.dynamo_contents import CONTENTS
from lightning_ort.compiler.exact_floats import EXACT_FLOATS
from lightning_ort.compiler.global_state import forget_frames

__all__ = ["MENDS"]


def _guarding_both(guard_of: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo takes an object that it has seen before for the same one always, if the names are local and global."""

    def make_dupe_guard(source: Any, first: Any) -> Any:
        guard = guard_of(source, first)
        if guard is None and first and source != first and is_from_local_source(source) != is_from_local_source(first):
            return functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=first)
        return guard

    return make_dupe_guard


def _looked_at(is_hashable: Callable[..., bool]) -> Callable[..., bool]:
    """A key that Dynamo hashes without a look at it has no guard. Those of dictionaries that exist have another."""

    def is_hashable_lazy(key: Any) -> bool:
        return isinstance(key.source, ConstDictKeySource) and is_hashable(key)

    return is_hashable_lazy


def _guarding_absence(lookup: Callable[..., Any]) -> Callable[..., Any]:
    """An attribute that is missing, or comes from ``__getattr__`` for that, may be there another time."""

    def generic_getattr(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        found = inspect.getattr_static(type(self.value), name, None)
        if self.source is None or not (found is None or isinstance(found, types.MemberDescriptorType)):
            return lookup(self, tx, name, *args, **kwargs)
        try:
            result = lookup(self, tx, name, *args, **kwargs)
        except ObservedAttributeError:
            install_guard(self.source.make_guard(functools.partial(GuardBuilder.HASATTR, attr=name)))
            raise
        fallback = inspect.getattr_static(type(self.value), "__getattr__", None)
        own = getattr(self.value, "__dict__", None)
        # modules keep what they have in dictionaries of their own, which are watched
        if found is None and fallback not in (None, nn.Module.__getattr__) and own is not None and name not in own:
            absent = functools.partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)
            install_guard(self.source.make_guard(absent))
        return result

    return generic_getattr


def _guarding_methods(walk: Callable[..., Any]) -> Callable[..., Any]:
    """A class may get another method while its objects live, for one of its own or for one of a class it comes from."""

    def get_source_by_walking_mro(self: Any, tx: Any, name: str) -> Any:
        source = walk(self, tx, name)
        kind, of_kind = (
            (self.value, self.source) if isinstance(self.value, type) else (type(self.value), self.cls_source)
        )
        owner = next(base for base in kind.__mro__ if name in base.__dict__)
        if isinstance(owner.__dict__[name], _METHODS) and _may_change(owner, name):
            install_guard(source.make_guard(GuardBuilder.ID_MATCH))
        absent = (id(kind), name)
        if owner is not kind and absent not in tx.output.guarded_mro_absent_keys and _may_change(kind, name):
            tx.output.guarded_mro_absent_keys.add(absent)
            is_absent = functools.partial(GuardBuilder.DICT_NOT_CONTAINS, key=name)
            install_guard(TypeDictSource(of_kind).make_guard(is_absent))
        return source

    return get_source_by_walking_mro


def _guarding_methods_of_new_ones(lookup: Callable[..., Any]) -> Callable[..., Any]:
    """An object that the step itself makes has no name of its own, but its class has."""

    def lookup_class_mro_attr(self: Any, name: str) -> Any:
        found = lookup(self, name)
        if self.source is None and self.cls_source is not None and isinstance(found, _METHODS):
            self.get_source_by_walking_mro(InstructionTranslator.current_tx(), name)
        return found

    return lookup_class_mro_attr


_METHODS = (types.FunctionType, property, staticmethod, classmethod)
_LIBRARIES = {"builtins", "torch", "lightning", "pytorch_lightning", "lightning_fabric"}


def _may_change(kind: type, name: str) -> bool:
    """The libraries' own classes keep their methods, but for layers that are computed in another way for a while."""
    return name == "forward" or kind.__module__.partition(".")[0] not in _LIBRARIES


def _guarding_names(lookup: Callable[..., Any], always: bool = True) -> Callable[..., Any]:
    """Names that a module of Python or a function has, or has not, asked by ``hasattr`` or for the attribute."""

    def method(self: Any, tx: Any, name: str) -> Any:
        if self.source is not None and (always or not hasattr(self.value, name)):
            install_guard(self.source.make_guard(functools.partial(GuardBuilder.HASATTR, attr=name)))
        return lookup(self, tx, name)

    return method


def _guarding_attributes_of_functions(lookup: Callable[..., Any]) -> Callable[..., Any]:
    """The same, for an attribute that a function has not."""

    def fn_var_getattr(tx: Any, function: Any, source: Any, name: str) -> Any:
        try:
            return lookup(tx, function, source, name)
        except ObservedAttributeError:
            if source is not None:
                install_guard(source.make_guard(functools.partial(GuardBuilder.HASATTR, attr=name)))
            raise

    return fn_var_getattr


def _guarding_answers(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Whether an object is an instance may be decided by what it has, as with a ``Protocol``, or by any function."""

    def call_isinstance(self: Any, tx: Any, arg: Any, kinds: Any) -> Any:
        answer = ask(self, tx, arg, kinds)
        there = known(arg)
        if isinstance(there, UserDefinedObjectVariable) and there.source is not None:
            asked = kinds.as_python_constant()
            if any(_decides_itself(kind) for kind in (asked if isinstance(asked, tuple) else (asked,))):
                is_as_before = functools.partial(_is_instance, kinds=asked, answer=answer.as_python_constant())
                install_guard(there.source.make_guard(is_as_before))
        return answer

    return call_isinstance


def _decides_itself(kind: Any) -> bool:
    return getattr(type(kind), "__instancecheck__", None) not in (type.__instancecheck__, abc.ABCMeta.__instancecheck__)


def _is_instance(guards: GuardBuilder, guard: Any, kinds: Any, answer: bool) -> None:
    watch(guards, guard, lambda now: isinstance(now, kinds) is answer, f"isinstance({{}}, {kinds}) is {answer}")


def _guarding_environment(find: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo watches no variable of Python's own modules, for which ``os.getenv`` reads ``os.environ``."""

    def get_globals_source_and_value(self: Any, name: str) -> Any:
        value, variable, source = find(self, name)
        skips = name == "environ" and isinstance(source, SkipGuardSource)
        return value, variable, source.base if skips else source

    return get_globals_source_and_value


def _guarding_absence_of_keys(lookup: Callable[..., Any]) -> Callable[..., Any]:
    def getitem_const_raise_exception_if_absent(self: Any, tx: Any, key: Any) -> Any:
        try:
            return lookup(self, tx, key)
        except ObservedKeyError:
            self.install_dict_contains_guard(tx, [key])
            raise

    return getitem_const_raise_exception_if_absent


def _guard_name(self: Any, tx: Any, args: Any) -> None:
    """What is, and is not, in the ``__dict__`` of an object, as Dynamo guards it of other dictionaries."""
    if self.source is not None and args[0].is_python_constant():
        install_guard(self.source.make_guard(functools.partial(_has_name, name=args[0].as_python_constant())))


def _guard_names(self: Any) -> None:
    if self.source is not None:
        install_guard(self.source.make_guard(_has_names))


def _has_name(guards: GuardBuilder, guard: Any, name: str) -> None:
    code = f"({name!r} in {guards.arg_ref(guard)}) is {name in guards.get(guard)}"
    guards.add_python_lambda_leaf_guard_to_root([code], get_verbose_code_parts(code, guard))


def _has_names(guards: GuardBuilder, guard: Any) -> None:
    code = f"[*{guards.arg_ref(guard)}] == {[*guards.get(guard)]!r}"
    guards.add_python_lambda_leaf_guard_to_root([code], get_verbose_code_parts(code, guard))


def _guarding_finiteness(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """The arithmetic of symbols knows no infinity, and what was compared with one is settled when a graph is made."""

    def wrap_symfloat(self: Any, value: float) -> Any:
        variable = wrap(self, value)
        if isinstance(variable, SymNodeVariable):
            install_guard(self.source.make_guard(_is_finite))
        return variable

    return wrap_symfloat


def _is_finite(guards: GuardBuilder, guard: Any) -> None:
    watch(guards, guard, math.isfinite, "{} is finite")


def _forgetting(describe: Callable[..., str]) -> Callable[..., str]:
    """What Dynamo does last with an error by which it leaves a function to Python."""

    def format_error_msg(error: Exception, *args: Any) -> str:
        text = describe(error, *args)
        forget_frames(error)
        return text

    return format_error_msg


def _left_as_they_are(change: Callable[..., None]) -> Callable[..., None]:
    """Dynamo sets ``capturable`` in the groups of an optimizer that a step looks at, and writes it back with what else
    the step sets there, such as a learning rate; updates are not compiled with steps."""
    return lambda self, tx: None


def _unmeasured(measure: Callable[..., float]) -> Callable[..., float]:
    """How long guards take is measured for logs alone, behind 32 MiB that are written to empty the caches: 20 ms."""

    def profile_guard_manager(*args: Any) -> float:
        return measure(*args) if dynamo_guards.guards_log.isEnabledFor(logging.DEBUG) else 0.0

    return profile_guard_manager


def _by_conditions(mark: Callable[..., Any]) -> Callable[..., Any]:
    """``x.requires_grad_(i % 2 == 0)``: a condition on numbers that change is decided here, as by ``if``."""

    def method_requires_grad_(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        there = known(requires_grad)
        if isinstance(there, SymNodeVariable):
            there = ConstantVariable.create(bool(there.evaluate_expr()))
        return mark(self, tx, there)

    return method_requires_grad_


_ALL: list[tuple[Any, str, Callable[..., Callable[..., Any]]]] = [
    *COMPARISONS,
    *CONTENTS,
    *CHANGES,
    *EXACT_FLOATS,
    *REMEMBERED,
    (builder, "make_dupe_guard", _guarding_both),
    (LazyVariableTracker, "is_hashable_lazy", _looked_at),
    (convert_frame, "format_error_msg", _forgetting),
    (OptimizerVariable, "_set_capturable", _left_as_they_are),
    (dynamo_guards, "profile_guard_manager", _unmeasured),
    (UserDefinedObjectVariable, "generic_getattr", _guarding_absence),
    (UserDefinedObjectVariable, "get_source_by_walking_mro", _guarding_methods),
    (UserDefinedClassVariable, "get_source_by_walking_mro", _guarding_methods),
    (UserDefinedObjectVariable, "lookup_class_mro_attr", _guarding_methods_of_new_ones),
    (PythonModuleVariable, "call_obj_hasattr", _guarding_names),
    (PythonModuleVariable, "var_getattr", functools.partial(_guarding_names, always=False)),
    (UserFunctionVariable, "call_obj_hasattr", _guarding_names),
    (functions, "fn_var_getattr", _guarding_attributes_of_functions),
    (BuiltinVariable, "call_isinstance", _guarding_answers),
    (InliningInstructionTranslator, "get_globals_source_and_value", _guarding_environment),
    (ConstDictVariable, "getitem_const_raise_exception_if_absent", _guarding_absence_of_keys),
    (VariableBuilder, "wrap_symfloat", _guarding_finiteness),
    (TensorVariable, "method_requires_grad_", _by_conditions),
    (DunderDictVariable, "install_dict_contains_guard", lambda original: _guard_name),
    (DunderDictVariable, "install_dict_keys_match_guard", lambda original: _guard_names),
]
MENDS = [(owner, name, mend) for owner, name, mend in _ALL if hasattr(owner, name)]
"""Functions of Dynamo by their owners, and what makes the one that takes their place, for those that this torch has."""
