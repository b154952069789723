"""Errors of Dynamo's that are mended while steps are compiled.

A graph is taken again as long as its guards hold, and of some values Dynamo forgets the guard: a step would go on with
the graph of another one. Those are objects that are read by a global name first and by an attribute then, such as a
member of an ``Enum`` that chooses from a dictionary; classes and functions by which an entry is looked up; and objects
that were found to be two. They get guards here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# Private: guards have no public name.
from torch._dynamo import convert_frame
from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts, install_guard
from torch._dynamo.source import ConstDictKeySource, is_from_local_source
from torch._dynamo.variables import builder, builtin, object_protocol
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.sets import SetVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

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


def _guarding_difference(compare: Callable[..., Any]) -> Callable[..., Any]:
    """``a is b`` may hold another time, though it does not now."""

    def vt_identity_compare(left: Any, right: Any) -> Any:
        answer = compare(left, right)
        if answer is not None and not answer.as_python_constant():
            known = [s.realize() if isinstance(s, LazyVariableTracker) else s for s in (left, right)]
            first, second = [k.source if isinstance(k, _COMPARED) else None for k in known]
            if first is not None and second is not None:
                install_guard(first.make_guard(functools.partial(_are_two, other=second)))
        return answer

    return vt_identity_compare


def _are_two(guards: GuardBuilder, guard: Any, other: Any) -> None:
    code = f"{guards.arg_ref(guard)} is not {guards.arg_ref(other.name)}"
    guards.add_python_lambda_leaf_guard_to_root([code], get_verbose_code_parts(code, guard))


_COMPARED = (UserDefinedObjectVariable, ConstDictVariable, SetVariable, BaseListVariable)
"""Objects that no guard of their own tells from others of their type."""


def _forgetting(describe: Callable[..., str]) -> Callable[..., str]:
    """What Dynamo does last with an error by which it leaves a function to Python."""

    def format_error_msg(error: Exception, *args: Any) -> str:
        text = describe(error, *args)
        forget_frames(error)
        return text

    return format_error_msg


MENDS: list[tuple[Any, str, Callable[..., Callable[..., Any]]]] = [
    (builder, "make_dupe_guard", _guarding_both),
    (LazyVariableTracker, "is_hashable_lazy", _looked_at),
    (convert_frame, "format_error_msg", _forgetting),
    *((owner, "vt_identity_compare", _guarding_difference) for owner in (builtin, object_protocol)),
]
"""Functions of Dynamo by their owners, and what makes the one that takes their place."""
