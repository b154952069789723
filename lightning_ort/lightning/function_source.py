"""The source of a function, where it is still the one that the function was made of."""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import re
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["Names", "body_of", "codes_in", "names_in"]

_FUTURE_ANNOTATIONS = annotations.compiler_flag


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """``code``, and those of functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


class Names(NamedTuple):
    """Names in a code and in those of functions inside of it.

    Attributes:
        all: of globals, attributes and imports.
        globals: those that are loaded as globals.
        attributes: those that are loaded as attributes.
    """

    all: frozenset[str]
    globals: frozenset[str]
    attributes: frozenset[str]


_NAMES: weakref.WeakKeyDictionary[types.CodeType, Names] = weakref.WeakKeyDictionary()
"""what has been read: all that a step reaches is looked at whenever something of it is compiled"""


def names_in(code: types.CodeType) -> Names:
    """The names in ``code``, read once."""
    if code not in _NAMES:
        codes = list(codes_in(code))
        loads = [
            (i.opname, str(i.argval)) for c in codes for i in dis.get_instructions(c) if i.opname.startswith("LOAD")
        ]
        _NAMES[code] = Names(
            frozenset(name for c in codes for name in c.co_names),
            frozenset(name for kind, name in loads if kind in ("LOAD_GLOBAL", "LOAD_NAME")),
            frozenset(name for kind, name in loads if "ATTR" in kind or "METHOD" in kind),
        )
    return _NAMES[code]


def body_of(function: types.FunctionType) -> list[ast.stmt] | None:
    """Body of a function, parsed; ``None`` where there is no source, or another than the function was made of."""
    code = function.__code__
    try:
        # not inspect.getsource, which looks at every module there is
        lines = linecache.getlines(code.co_filename, function.__globals__)
        source = "".join(inspect.getblock(lines[code.co_firstlineno - 1 :]))
        tree = ast.parse(f"if True:\n{source}" if source[:1].isspace() else source)
        future = code.co_flags & _FUTURE_ANNOTATIONS
        compiled = compile(tree, "<source>", "exec", flags=future, dont_inherit=True)
    except (SyntaxError, ValueError, IndexError):
        return None
    match tree.body:
        case [ast.FunctionDef() | ast.AsyncFunctionDef() as definition] | [
            ast.If(body=[ast.FunctionDef() | ast.AsyncFunctionDef() as definition])
        ]:
            body = definition.body
            bodies = [c for c in compiled.co_consts if isinstance(c, types.CodeType) and c.co_name == code.co_name][-1:]
        case _:
            lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
            bodies = [c for c in codes_in(compiled) if c.co_name == code.co_name]
            if len(lambdas) != 1 or code.co_name != "<lambda>":
                return None
            body = [ast.Return(lambdas[0].body)]
    return body if len(bodies) == 1 and _is_same(bodies[0], code) else None


def _is_same(compiled: types.CodeType, running: types.CodeType) -> bool:
    """Whether two codes do the same; around one of them are the function, class and file that it was written in.

    These change how names are found. The file may be another than the one that was imported.
    """
    a, b = _instructions(compiled), _instructions(running)
    return len(a) == len(b) and all(
        x == y or (x[0] == y[0] and isinstance(y[1], str) and y[1].startswith("_") and y[1].endswith(str(x[1])))
        for x, y in zip(a, b, strict=True)
    )


_PLUMBING = frozenset(
    {"CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "LOAD_CLOSURE", "MAKE_CELL", "NOP", "NOT_TAKEN", "PUSH_NULL", "RESUME"}
    | {"BUILD_TUPLE", "SET_FUNCTION_ATTRIBUTE"}
)
"""instructions that are there, or more often, for the sake of variables of functions around"""
_NAMED = re.compile(r"(LOAD|STORE|DELETE)_(GLOBAL|NAME|DEREF|FAST|CLASSDEREF|FAST_CHECK|FAST_BORROW|FROM_DICT_OR_\w+)$")


def _instructions(code: types.CodeType) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for part in codes_in(code):
        for i in dis.get_instructions(part):
            named = _NAMED.match(i.opname)
            if i.opname in _PLUMBING:
                continue
            if named:
                found.append((named[1], i.argval))
            elif isinstance(i.argval, types.CodeType) or i.opcode in _JUMPS or i.opname == "MAKE_FUNCTION":
                found.append((i.opname, None))
            else:
                found.append((i.opname.replace("METHOD", "ATTR"), i.argval))  # of modules, which are imported around it
    return found


_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
