"""Stand-ins for list attributes that grow while a step runs, so that a step is one graph.

``self.outputs.append`` makes Dynamo compile again for every length of the list. The stand-in only collects; what it
collected reaches the list when the step has ended.
"""

from __future__ import annotations

import dis
import itertools
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from typing import Any

import torch

__all__ = ["GrowingList", "GrowingLists", "appended_attributes"]


def appended_attributes(cls: type, method: Callable[..., Any]) -> set[str]:
    """Names of the attributes to which ``method``, or a method of ``cls`` that it mentions, appends."""
    found: set[str] = set()
    seen: set[Any] = set()
    pending = [getattr(method, "__code__", None)]
    while pending:
        code = pending.pop()
        if code is None or code in seen:
            continue
        seen.add(code)
        instructions = list(dis.get_instructions(code))
        for first, second in itertools.pairwise(instructions):
            appends = second.opname in ("LOAD_METHOD", "LOAD_ATTR") and second.argval in ("append", "extend")
            if appends and first.opname == "LOAD_ATTR":
                found.add(str(first.argval))
        for name in code.co_names:
            pending.append(getattr(getattr(cls, name, None), "__code__", None))
    return found


class GrowingLists:
    """Finds the lists in a namespace (and in dictionaries in it) that grow, and places stand-ins for them.

    Args:
        attributes: the module's instance namespace.
    """

    def __init__(self, attributes: dict[str, Any]) -> None:
        self._attributes = attributes
        self._expected: set[str] = set()
        self._growing: dict[tuple[str | None, Any], GrowingList] = {}
        self._placed: list[tuple[dict[Any, Any], Any, GrowingList]] = []
        self._lengths: list[tuple[tuple[str | None, Any], list[Any], int]] = []

    def expect(self, names: Iterable[str]) -> None:
        """Stand in for the lists of these names without having seen them grow."""
        self._expected.update(names)

    def place(self) -> None:
        """Put the stand-ins in place; to be called before a step."""
        self._lengths = []
        for owner, namespace in self._namespaces():
            for key, value in list(namespace.items()):
                if type(value) is not list:
                    continue
                where = (owner, key)
                standin = self._growing.get(where)
                if standin is None and owner is None and key in self._expected:
                    standin = self._growing[where] = GrowingList(value)
                if standin is None:
                    self._lengths.append((where, value, len(value)))
                    continue
                # a new list may have been bound to the name; for Dynamo the stand-in must stay the same object
                standin.real = value
                namespace[key] = standin
                self._placed.append((namespace, key, standin))

    def remove(self) -> None:
        """Put the real lists back, complete, and learn which others grow; to be called after a step."""
        for namespace, key, standin in self._placed:
            standin.flush()
            if namespace.get(key) is standin:
                namespace[key] = standin.real
        self._placed = []
        known = set()
        for where, value, length in self._lengths:
            known.add(where)
            if len(value) > length:
                self._growing.setdefault(where, GrowingList(value))
        for owner, namespace in self._namespaces():
            if owner is None:
                continue
            for key, value in namespace.items():  # a dictionary of lists is often filled by its first step
                where = (owner, key)
                if type(value) is list and value and where not in known:
                    self._growing.setdefault(where, GrowingList(value))

    def _namespaces(self) -> Iterator[tuple[str | None, dict[Any, Any]]]:
        yield None, self._attributes
        for name, value in self._attributes.items():
            # names with an underscore belong to torch and Lightning
            if isinstance(value, dict) and not name.startswith("_"):
                yield name, value


class GrowingList(MutableSequence[Any]):
    """Stands in for a list attribute that grows from step to step.

    Appending collects in a short list of this step; everything else acts on the real list, outside of the graph.

    Args:
        real: the list that is stood in for.
    """

    def __init__(self, real: list[Any]) -> None:
        self.real = real
        self._fresh: list[Any] = []

    def append(self, value: Any) -> None:
        self._fresh.append(value)

    def flush(self) -> None:
        """Move what was collected to the real list."""
        if self._fresh:
            fresh, self._fresh = self._fresh, []
            self.real.extend(fresh)

    @torch.compiler.disable
    def whole(self) -> list[Any]:
        """The real list with all that was appended."""
        self.flush()
        return self.real

    @torch.compiler.disable
    def __getitem__(self, index: Any) -> Any:
        return self.whole()[index]

    @torch.compiler.disable
    def __setitem__(self, index: Any, value: Any) -> None:
        self.whole()[index] = value

    @torch.compiler.disable
    def __delitem__(self, index: Any) -> None:
        del self.whole()[index]

    @torch.compiler.disable
    def __len__(self) -> int:
        return len(self.whole())

    @torch.compiler.disable
    def __iter__(self) -> Iterator[Any]:
        return iter(self.whole())

    @torch.compiler.disable
    def insert(self, index: int, value: Any) -> None:
        self.whole().insert(index, value)

    @torch.compiler.disable
    def extend(self, values: Iterable[Any]) -> None:
        self.whole().extend(values)

    @torch.compiler.disable
    def clear(self) -> None:
        self.whole().clear()

    @torch.compiler.disable
    def pop(self, index: int = -1) -> Any:
        return self.whole().pop(index)

    @torch.compiler.disable
    def sort(self, **kwargs: Any) -> None:
        self.whole().sort(**kwargs)

    @torch.compiler.disable
    def copy(self) -> list[Any]:
        return self.whole().copy()

    @torch.compiler.disable
    def __add__(self, other: Any) -> list[Any]:
        return self.whole() + other

    @torch.compiler.disable
    def __iadd__(self, values: Iterable[Any]) -> GrowingList:
        self.whole().extend(values)
        return self

    @torch.compiler.disable
    def __eq__(self, other: object) -> bool:
        return self.whole() == (other.whole() if isinstance(other, GrowingList) else other)

    __hash__ = None  # type: ignore[assignment]
