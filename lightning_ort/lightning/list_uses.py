"""Which lists a step lets grow, and does nothing else with than a stand-in can: read from the source of all it reaches.

Too much is taken for reached rather than too little, and an expression that is not known to be harmless for harmful.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from lightning_ort.environment import LIBRARIES
from lightning_ort.lightning.function_source import body_of, codes_in, names_in

__all__ = ["ListUses", "uses_of_lists"]

_GROW = frozenset({"append", "extend", "insert"})
_OF_LISTS = _GROW | {"clear", "copy", "count", "index", "pop", "remove", "reverse", "sort"}
_READERS = frozenset({"all", "any", "bool", "len", "list", "max", "min", "set", "sorted", "sum", "tuple"})
"""builtins that keep nothing of a list but its elements"""
_OF_DICTIONARIES = frozenset({"clear", "keys", "update"})
_ENTRIES = frozenset({"get", "pop", "setdefault"})
"""methods that return a value of a dictionary"""
_ANYTHING = frozenset({"__dict__", "__getattribute__", "__getstate__", "attrgetter", "methodcaller"})
_ANYTHING_BUILTIN = frozenset({"eval", "exec", "vars"})
"""names by which code reaches attributes that it does not name"""
_CONTAINERS = (list, tuple, set, frozenset, dict)
_HOOKS = (
    "backward",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_after_backward",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
)
"""called while a step runs that optimizes by itself"""
_NOT_IN_STEPS = frozenset(
    {"__copy__", "__deepcopy__", "__getstate__", "__init__", "__init_subclass__", "__new__", "__reduce__"}
    | {"__reduce_ex__", "__repr__", "__setstate__", "__str__"}
)
"""methods that are read only where their name stands"""
_FRAMEWORKS = frozenset(
    {"lightning", "lightning_fabric", "lightning_ort", "lightning_utilities", "numpy", "pytorch_lightning", "torch"}
    | {"torchmetrics"}
)
"""packages that know no attribute of a user"""
_STANDARD = sysconfig.get_path("stdlib")


class ListUses(NamedTuple):
    """Attributes with lists that may be stood in for during one step.

    Attributes:
        lists: names of the lists that grow.
        dictionaries: names of the dictionaries with lists that grow.
    """

    lists: frozenset[str] = frozenset()
    dictionaries: frozenset[str] = frozenset()


def uses_of_lists(module: nn.Module, method: Callable[..., Any]) -> ListUses:
    """The lists that ``method`` of ``module`` lets grow, and of which nothing it reaches sees more than a list has."""
    uses = _Uses(vars(module))
    for function in _Reached(module, method):
        uses.read(function)
    if uses.refuses_all:
        return ListUses()
    return ListUses(uses.allowed_lists(), uses.allowed_dictionaries())


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


class _Reached:
    """Iterates over the functions of users that ``method`` may call, found by name.

    A name may be a method of the module, of its base classes, of a submodule, of an object that is an attribute, of a
    callback, or a global. Which object it is asked of is not looked at: too many are found rather than too few.
    """

    def __init__(self, module: nn.Module, method: Callable[..., Any]) -> None:
        self._names: set[str] = set()
        self._classes: set[type] = set()
        self._not_named: dict[str, list[Any]] = {}  # attributes of these, by a name that stands nowhere so far
        self._seen: set[types.FunctionType] = set()
        self._pending: list[tuple[types.FunctionType, bool]] = []
        self._packages = {_package(getattr(base, "__module__", None)) for base in type(module).__mro__} - _FRAMEWORKS
        self._add(method)
        self._add_class(type(module))
        for each in module.modules():
            self._add_class(type(each))
            for hooks in (each._forward_hooks, each._forward_pre_hooks, each._backward_hooks, each._backward_pre_hooks):
                for hook in hooks.values():
                    self._add(hook)
        for value in vars(module).values():
            self._add(value)
        for callback in getattr(getattr(module, "_trainer", None), "callbacks", ()):
            self._add_class(type(callback))
        if not getattr(module, "automatic_optimization", True):
            for name in _HOOKS:
                self._add_name(name)

    def __iter__(self) -> Iterator[types.FunctionType]:
        while self._pending:
            function, of_user = self._pending.pop()
            for cell in function.__closure__ or ():
                try:
                    self._add(cell.cell_contents, mentioned=True)
                except ValueError:  # not bound yet
                    continue
            self._add(getattr(function, "__wrapped__", None))
            if not of_user:
                continue
            names, global_names, _ = names_in(function.__code__)
            package = function.__globals__.get("__package__")
            for name in names:
                self._add_name(name)
            for name in global_names:
                self._add(function.__globals__.get(name), mentioned=True)
            for name in names:  # functions of other files, by their module
                for space in (
                    function.__globals__.get(name),
                    sys.modules.get(name),
                    sys.modules.get(f"{package}.{name}"),
                ):
                    if isinstance(space, types.ModuleType) and _package(space.__name__) not in _FRAMEWORKS:
                        for other in names:
                            self._add(vars(space).get(other), mentioned=True)
            yield function

    def _of_user(self, function: types.FunctionType) -> bool:
        """Whether a function may know attributes of the module: none of a library, unless the module is of that."""
        file, package = function.__code__.co_filename, _package(function.__globals__.get("__name__"))
        standard = file.startswith((_STANDARD, "<frozen ")) and "site-packages" not in file
        if package in _FRAMEWORKS or standard:
            return False
        return package in self._packages or not file.startswith(LIBRARIES)

    def _add_name(self, name: str) -> None:
        if name not in self._names:
            self._names.add(name)
            for value in self._not_named.pop(name, ()):
                self._add(value)

    def _add_class(self, owner: type, instantiated: bool = False) -> None:
        if instantiated:
            for base in owner.__mro__:
                self._add(vars(base).get("__init__"))
        package = _package(getattr(owner, "__module__", None))  # a class that exec makes may have none
        if package in _FRAMEWORKS or package == "builtins":
            return
        for base in owner.__mro__:
            if base in self._classes:
                continue
            self._classes.add(base)
            for name, value in vars(base).items():
                special = name.startswith("__") and name.endswith("__") and name not in _NOT_IN_STEPS
                if special or name == "forward" or name in self._names:
                    self._add(value)
                else:
                    self._not_named.setdefault(name, []).append(value)

    def _add(self, value: Any, mentioned: bool = False) -> None:
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            if isinstance(value, types.MethodType):
                self._add_class(value.__self__ if isinstance(value.__self__, type) else type(value.__self__))
            self._add(value.__func__)
        elif isinstance(value, (functools.partial, functools.cached_property)):
            self._add(value.func)
        elif isinstance(value, property):
            for function in (value.fget, value.fset, value.fdel):
                self._add(function)
        elif isinstance(value, types.FunctionType):
            if value not in self._seen:
                self._seen.add(value)
                self._pending.append((value, self._of_user(value)))
        elif isinstance(value, type):
            self._add_class(value, instantiated=mentioned)
        elif isinstance(value, _CONTAINERS):
            for entry in value.values() if isinstance(value, dict) else value:
                if not isinstance(entry, _CONTAINERS):
                    self._add(entry)
        elif value is not None and not isinstance(value, types.ModuleType):
            self._add_class(type(value))
            for entry in list(getattr(value, "__dict__", {}).values()):
                if isinstance(entry, (types.FunctionType, types.MethodType, functools.partial)):
                    self._add(entry)


class _Uses:
    """Sorts what functions do with attributes by whether a stand-in does it like a list, or a dictionary of them.

    Args:
        attributes: names of attributes that there are.
    """

    def __init__(self, attributes: Iterable[str]) -> None:
        self.refuses_all = False
        self._attributes = list(attributes)
        self._growing_lists: set[str] = set()
        self._growing_dictionaries: set[str] = set()
        # names, and regular expressions of names that are put together at run time
        self._no_lists: set[str] = set()
        self._no_dictionaries: set[str] = set()

    def allowed_lists(self) -> frozenset[str]:
        return _without(self._growing_lists, self._no_lists)

    def allowed_dictionaries(self) -> frozenset[str]:
        return _without(self._growing_dictionaries, self._no_dictionaries)

    def read(self, function: types.FunctionType) -> None:
        """Take down what ``function`` does with every attribute that it loads."""
        found = _found_in(function)
        self.refuses_all |= found.refuses_all
        self._no_lists |= found.refused
        self._no_dictionaries |= found.refused
        for name, of_list, of_dictionary in found.uses:
            names = [a for a in self._attributes if re.fullmatch(name, a)] if _is_pattern(name) else [name]
            for use, growing, refused in (
                (of_list, self._growing_lists, self._no_lists),
                (of_dictionary, self._growing_dictionaries, self._no_dictionaries),
            ):
                if use is None:
                    refused.add(name)
                elif use:
                    growing.update(names)


class _Found(NamedTuple):
    """What a function does with attributes.

    Attributes:
        refuses_all: it may reach attributes that it does not name.
        refused: names of attributes with which it may do anything.
        uses: names, or regular expressions of names, and whether something grows there as a list and in a dictionary;
            ``None`` if a stand-in could be told from one.
    """

    refuses_all: bool
    refused: frozenset[str]
    uses: frozenset[tuple[str, bool | None, bool | None]]


_FOUND: weakref.WeakKeyDictionary[types.CodeType, dict[Any, _Found]] = weakref.WeakKeyDictionary()
"""what has been found, by code and by what is global of the names in it"""


def _found_in(function: types.FunctionType) -> _Found:
    names, space = names_in(function.__code__).all, function.__globals__
    known = frozenset((n, isinstance(space[n], types.ModuleType)) for n in names if n in space)
    found = _FOUND.setdefault(function.__code__, {})
    if known not in found:
        found[known] = _find(function)
    return found[known]


def _find(function: types.FunctionType) -> _Found:
    names, global_names, attributes = names_in(function.__code__)
    refuses_all = bool(names & _ANYTHING or global_names & _ANYTHING_BUILTIN)
    body = body_of(function)
    if body is None:
        return _Found(refuses_all or "getattr" in global_names, attributes, frozenset())
    scope, refused, uses = _Scope(body, function, names), set(), set()

    def note(name: str, node: ast.expr) -> None:
        uses.add((name, scope.use_of_list(node), scope.use_of_dictionary(node)))

    for attribute in scope.nodes(ast.Attribute):
        changed = isinstance(attribute.ctx, ast.Store) and isinstance(scope.parents[attribute], ast.AugAssign)
        if isinstance(attribute.ctx, ast.Load) or changed:
            note(scope.name(attribute.attr), attribute)
    for node in scope.nodes(ast.Name):
        if node.id != "getattr":
            continue
        match scope.parents[node]:
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                refused.add(name)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.JoinedStr(values=parts)]) as call:
                told = [re.escape(str(p.value)) if isinstance(p, ast.Constant) else _ANY for p in parts]
                note("".join(told), call)
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id=name), _, *_]) if scope.is_module(name):
                pass
            case _:
                refuses_all = True
    return _Found(refuses_all, frozenset(refused), frozenset(uses))


_ANY = ".*"


def _is_pattern(name: str) -> bool:
    return _ANY in name


def _without(names: set[str], refused: set[str]) -> frozenset[str]:
    patterns = [re.compile(name) for name in refused if _is_pattern(name)]
    return frozenset(n for n in names - refused if not any(p.fullmatch(n) for p in patterns))


class _Scope:
    """The source of a function, with the place of each node.

    Each ``use_of_`` gives whether something grows there, or ``None`` if a stand-in could be told from a list.
    """

    def __init__(self, body: list[ast.stmt], function: types.FunctionType, names: Iterable[str]) -> None:
        self._nodes = [node for statement in body for node in ast.walk(statement)]
        self.parents = {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}
        self._globals = function.__globals__
        self._locals = {n for code in codes_in(function.__code__) for n in (*code.co_varnames, *code.co_cellvars)}
        self._locals.update(function.__code__.co_freevars)
        self._private = {n for n in names if n.startswith("_") and "__" in n[1:]}

    def nodes(self, kind: type[Any]) -> Iterator[Any]:
        return (node for node in self._nodes if isinstance(node, kind))

    def name(self, name: str) -> str:
        """An attribute's name, as the class changes private ones."""
        if name.startswith("__") and not name.endswith("__"):
            return next((n for n in self._private if n.endswith(name)), name)
        return name

    def is_module(self, name: str) -> bool:
        return name not in self._locals and isinstance(self._globals.get(name), types.ModuleType)

    def _is_builtin(self, name: str) -> bool:
        return name not in self._locals and name not in self._globals and hasattr(builtins, name)

    def use_of_list(self, node: ast.expr) -> bool | None:
        parent = self.parents.get(node)
        match parent:
            case ast.Attribute(attr=method) if method in _OF_LISTS and self._is_called(parent):
                return method in _GROW
            case ast.Call(func=ast.Name(id=reader), args=[only], keywords=_) if only is node:
                return False if reader in _READERS and self._is_builtin(reader) else None
            case ast.Subscript(value=value) if value is node:
                return False
            case ast.AugAssign(target=target, op=ast.Add()) if target is node:
                return True
            case ast.For(iter=iterated) | ast.comprehension(iter=iterated, is_async=0) if iterated is node:
                return False
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[container]) if container is node:
                return False
            case ast.Expr():
                return False
        return False if self._is_test(node) else None

    def use_of_dictionary(self, node: ast.expr) -> bool | None:
        parent = self.parents.get(node)
        match parent:
            case ast.Subscript(value=value, ctx=ast.Load()) if value is node:
                return self.use_of_list(parent)
            case ast.Subscript(value=value) if value is node:
                changed = self.parents[parent]
                return isinstance(changed, ast.AugAssign) and isinstance(changed.op, ast.Add)
            case ast.Attribute(attr=method) if method in _OF_DICTIONARIES and self._is_called(parent):
                return False
            case ast.Attribute(attr=method) if method in _ENTRIES and self._is_called(parent):
                return self.use_of_list(self.parents[parent])  # type: ignore[arg-type]
            case ast.Call(func=ast.Name(id="len" | "bool" as reader)):
                return False if self._is_builtin(reader) else None
            case ast.For(iter=iterated) | ast.comprehension(iter=iterated, is_async=0) if iterated is node:
                return False
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[container]) if container is node:
                return False
        return False if self._is_test(node) else None

    def _is_called(self, node: ast.AST) -> bool:
        call = self.parents.get(node)
        return isinstance(call, ast.Call) and call.func is node

    def _is_test(self, node: ast.AST) -> bool:
        """Whether only the truth of the value is looked at."""
        parent = self.parents.get(node)
        match parent:
            case ast.UnaryOp(op=ast.Not()):
                return True
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Assert(test=test):
                return test is node
            case ast.comprehension(ifs=tests):
                return node in tests
            case ast.BoolOp():
                return self._is_test(parent)
        return False
