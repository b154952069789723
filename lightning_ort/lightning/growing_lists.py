"""Stand-ins for list attributes that grow while a step runs, so that a step is one graph.

``self.outputs.append`` makes Dynamo compile again for every length of the list. The stand-in only collects; what it
collected reaches the list when the step has ended. A list is stood in for where nobody can tell: the source of all
that the step reaches does nothing with the attribute but what the stand-in does like a list, and nobody else holds the
list. Every other list stays what it is.
"""

from __future__ import annotations

import copy
import functools
import gc
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from typing import Any

import torch
from torch import nn

from lightning_ort.lightning.list_uses import ListUses, uses_of_lists

__all__ = ["GrowingList", "GrowingLists"]


class GrowingLists:
    """Places stand-ins for the lists of a module, and of dictionaries that are its attributes, that grow in its steps.

    Args:
        module: whose attributes they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._attributes = module, module.__dict__
        self._uses: dict[str, ListUses] = {}
        self._read_again: dict[str, Callable[..., Any]] = {}  # before the next step of that name
        self._standins: dict[tuple[str | None, Any], GrowingList] = {}
        self._holders: dict[tuple[str | None, Any], int] = {}
        self._escaped: set[tuple[str | None, Any]] = set()
        self._placed: list[tuple[dict[Any, Any], Any, tuple[str | None, Any]]] = []
        self._lengths: dict[tuple[str | None, Any], int] = {}
        self._running: list[str] = []

    def expect(self, step: str, method: Callable[..., Any]) -> None:
        """Read what ``method`` does with lists; to be called before the first step of that name."""
        self._uses[step] = uses_of_lists(self._module, method)

    def reconsider(self, step: str, method: Callable[..., Any]) -> None:
        """Read ``method`` again, of which something is about to be compiled: hooks and functions may be there by now
        that were not when it was first called. Lists that they could tell from their stand-ins are put back."""
        if len(self._running) != 1:
            return
        if not self._placed:
            self._read_again[step] = method
            return
        uses = self._uses[step] = uses_of_lists(self._module, method)
        for entry in list(self._placed):
            namespace, key, where = entry
            dictionary, name = where
            if name in uses.lists if dictionary is None else dictionary in uses.dictionaries:
                continue
            self._placed.remove(entry)
            standin = self._standins[where]
            if namespace.get(key) is standin:
                namespace[key] = standin.real
            self._let_go(where)

    def place(self, step: str) -> None:
        """Put the stand-ins in place; to be called before a step."""
        self._running.append(step)
        if len(self._running) > 1:  # what was read of one step does not hold for another
            self._put_back()
            return
        if step in self._read_again:
            self.expect(step, self._read_again.pop(step))
        for name in self._uses[step].lists:
            self._stand_in(self._attributes, name, (None, name))
        for name, entries in self._dictionaries(step):
            for key in list(entries):
                where = (name, key)
                if where in self._standins:
                    self._stand_in(entries, key, where)
                elif type(entries[key]) is list:
                    self._lengths[where] = len(entries[key])

    def remove(self) -> None:
        """Put the real lists back, complete, and learn which others grow; to be called after a step."""
        step = self._running.pop()
        if self._running:
            return
        self._put_back()
        placed, self._placed = self._placed, []
        for _, _, where in placed:
            if self._has_escaped(where):
                self._let_go(where)
            else:
                self._standins[where].real = []
        for name, entries in self._dictionaries(step):
            for key, value in entries.items():  # a dictionary of lists is often filled by its first step
                where = (name, key)
                if type(value) is list and len(value) > self._lengths.get(where, 0) and where not in self._escaped:
                    self._standins.setdefault(where, GrowingList())
        self._lengths.clear()

    def _dictionaries(self, step: str) -> Iterator[tuple[str, dict[Any, Any]]]:
        for name in self._uses[step].dictionaries:
            if type(self._attributes.get(name)) in _DICTIONARIES and _holders(self._attributes, name) == _ALONE:
                yield name, self._attributes[name]

    def _stand_in(self, namespace: dict[Any, Any], key: Any, where: tuple[str | None, Any]) -> None:
        # who else holds the list may read it, or keep it as a list
        if type(namespace.get(key)) is not list or _holders(namespace, key) > _ALONE or where in self._escaped:
            return
        standin = self._standins.setdefault(where, GrowingList())
        # a new list may have been bound to the name; for Dynamo the stand-in must stay the same object
        standin.real = namespace[key]
        namespace[key] = standin
        self._placed.append((namespace, key, where))

    def _put_back(self) -> None:
        for namespace, key, where in self._placed:
            standin = self._standins[where]
            standin.flush()
            if namespace.get(key) is standin:
                namespace[key] = standin.real

    def _has_escaped(self, where: tuple[str | None, Any]) -> bool:
        """Whether somebody has kept the stand-in; Dynamo may, for as long as it likes."""
        known = self._holders.get(where, _ALONE)
        if _holders(self._standins, where) > known:
            gc.collect()  # what Dynamo has left over of a graph break
        self._holders[where] = _holders(self._standins, where)
        return self._holders[where] > known and any(
            other is not self._standins
            and not isinstance(other, types.FrameType)
            and not type(other).__module__.startswith("torch._dynamo")
            for other in gc.get_referrers(self._standins[where])
        )

    def _let_go(self, where: tuple[str | None, Any]) -> None:
        """Leave an escaped stand-in to its list for good."""
        standin = self._standins.pop(where)
        self._escaped.add(where)
        standin.settle()
        for namespace in (self._attributes, *(v for v in self._attributes.values() if isinstance(v, dict))):
            for key, value in list(namespace.items()):
                if value is standin:
                    namespace[key] = standin.real


_DICTIONARIES = (dict, defaultdict, OrderedDict)


def _holders(namespace: dict[Any, Any], key: Any) -> int:
    """Number of references to a value of ``namespace``, those of this call included."""
    return sys.getrefcount(namespace[key])


_ALONE = _holders({"": []}, "")
"""what it is for a value that nobody else holds"""


def _of_list(name: str) -> Callable[..., Any]:
    method = getattr(list, name)

    @torch.compiler.disable
    @functools.wraps(method)
    def call(self: GrowingList, *args: Any, **kwargs: Any) -> Any:
        others = (arg.whole() if isinstance(arg, GrowingList) else arg for arg in args)
        return method(self.whole(), *others, **kwargs)

    return call


class GrowingList(MutableSequence[Any]):
    """Stands in for a list that grows from step to step.

    Appending collects in a short list of this step; everything else acts on the real list, outside of the graph.

    Attributes:
        real: the list that is stood in for.
    """

    def __init__(self) -> None:
        self.real: list[Any] = []
        self._fresh: list[Any] = []

    def append(self, value: Any) -> None:
        self._fresh.append(value)

    def flush(self) -> None:
        """Move what was collected to the real list."""
        if self._fresh and self._fresh is not self.real:
            fresh, self._fresh = self._fresh, []
            self.real.extend(fresh)

    def settle(self) -> None:
        """Collect nothing from now on: all that is appended reaches the list at once."""
        self.flush()
        self._fresh = self.real

    @torch.compiler.disable
    def whole(self) -> list[Any]:
        """The real list with all that was appended."""
        self.flush()
        return self.real

    @torch.compiler.disable
    def __iter__(self) -> Iterator[Any]:
        return self._elements(self.whole())

    def _elements(self, real: list[Any]) -> Iterator[Any]:
        # like that of a list, it meets what is appended meanwhile
        position = 0
        while True:
            if real is self.real:
                self.flush()
            if position >= len(real):
                return
            yield real[position]
            position += 1

    @torch.compiler.disable
    def __iadd__(self, values: Iterable[Any]) -> GrowingList:
        self.whole().extend(values)
        return self

    @torch.compiler.disable
    def __imul__(self, number: int) -> GrowingList:
        self.whole()[:] = self.whole() * number
        return self

    @torch.compiler.disable
    def __copy__(self) -> list[Any]:
        return self.whole().copy()

    @torch.compiler.disable
    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return copy.deepcopy(self.whole(), memo)

    @torch.compiler.disable
    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self.whole(),)

    @torch.compiler.disable
    def __radd__(self, other: list[Any]) -> list[Any]:
        return other + self.whole()

    __getitem__ = _of_list("__getitem__")
    __setitem__ = _of_list("__setitem__")
    __delitem__ = _of_list("__delitem__")
    __len__ = _of_list("__len__")
    __contains__ = _of_list("__contains__")
    __reversed__ = _of_list("__reversed__")
    __repr__ = _of_list("__repr__")
    __add__ = _of_list("__add__")
    __mul__ = _of_list("__mul__")
    __rmul__ = _of_list("__rmul__")
    __eq__ = _of_list("__eq__")
    __ne__ = _of_list("__ne__")
    __lt__ = _of_list("__lt__")
    __le__ = _of_list("__le__")
    __gt__ = _of_list("__gt__")
    __ge__ = _of_list("__ge__")
    clear = _of_list("clear")
    copy = _of_list("copy")
    count = _of_list("count")
    extend = _of_list("extend")
    index = _of_list("index")
    insert = _of_list("insert")
    pop = _of_list("pop")
    remove = _of_list("remove")
    reverse = _of_list("reverse")
    sort = _of_list("sort")
    __hash__ = None  # type: ignore[assignment]
