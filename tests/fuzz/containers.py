"""Steps that change a container: what it is, where it lies, and by which statement.

``python -m tests.fuzz.containers --seconds 600`` draws combinations until the time is over and prints those of which a
compiled function leaves something else than Python does. Graphs run as they are: it is what Dynamo makes of the changes
that is tested, and what makes up for it.
"""

from __future__ import annotations

import array
import collections
import logging
import random
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_ort.compiler.dynamo import Preparation

from .changes import search

__all__ = ["CONTAINERS", "PLACES", "STATEMENTS", "check", "draw"]


class OwnList(list):
    pass


class OwnDict(dict):
    def __missing__(self, key: Any) -> int:
        return 7


class OwnSet(set):
    pass


class Total:
    def __init__(self) -> None:
        self.value, self.items = 0, [1]

    def __iadd__(self, other: Any) -> Total:
        self.value += other
        return self

    def __repr__(self) -> str:
        return f"Total({self.__dict__})"


LISTS: dict[str, Callable[[], Any]] = {"list": lambda: [3, 1, 2], "own list": lambda: OwnList([3, 1, 2])}
QUEUES: dict[str, Callable[[], Any]] = {
    "deque": lambda: collections.deque([3, 1, 2]),
    "full deque": lambda: collections.deque([3, 1, 2], 3),
    "deque with room": lambda: collections.deque([3, 1], 4),
}
DICTS: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"a": 1, "b": 2},
    "own dict": lambda: OwnDict(a=1, b=2),
    "ordered": lambda: collections.OrderedDict(a=1, b=2),
    "defaultdict": lambda: collections.defaultdict(int, a=1, b=2),
    "counter": lambda: collections.Counter(a=1, b=2),
}
SETS: dict[str, Callable[[], Any]] = {"set": lambda: {1, 2, 3, 9}, "own set": lambda: OwnSet({1, 2, 3, 9})}
ARRAYS: dict[str, Callable[[], Any]] = {
    "array": lambda: np.array([3.0, 1.0, 2.0]),
    "integers": lambda: np.array([3, 1, 2]),
    "matrix": lambda: np.arange(6.0).reshape(3, 2),
    "number": lambda: np.array(3.0),
    "masked": lambda: np.ma.array([3.0, 1.0, 2.0], mask=[0, 1, 0]),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(b"abc"),
    "array of Python": lambda: array.array("d", [3.0, 1.0, 2.0]),
    "object": Total,
    "namespace": lambda: types.SimpleNamespace(value=0, items=[1]),
    "int": lambda: 3,
    "float": lambda: 0.5,
    "str": lambda: "abc",
    "tuple": lambda: (3, 1, 2),
    "np.int32": lambda: np.int32(3),
    "tensor": lambda: torch.tensor([3.0, 1.0, 2.0]),
}
CONTAINERS = {**LISTS, **QUEUES, **DICTS, **SETS, **ARRAYS, **OTHERS}


def _read() -> dict[str, list[str]]:
    """Statements by the kind of what they change, which stands for ``{v}`` there; braces are doubled."""
    kinds: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("container_statements.txt").read_text().splitlines():
        if line.startswith("["):
            statements = kinds.setdefault(line.strip("[]"), [])
        elif line:
            statements += line.split(" | ")
    return kinds


_KINDS = _read()
STATEMENTS: dict[str, list[str]] = {
    **dict.fromkeys(LISTS, _KINDS["lists"]),
    **dict.fromkeys(QUEUES, _KINDS["queues"]),
    **dict.fromkeys(DICTS, _KINDS["dicts"]),
    "counter": _KINDS["dicts"] + _KINDS["counters"],
    **dict.fromkeys(SETS, _KINDS["sets"]),
    **dict.fromkeys(ARRAYS, _KINDS["arrays"]),
    "bytearray": ["{v}.append(i)", "{v} += b'b'", "{v}[0] = i", "r = {v}.pop()", "{v}.extend(b'bc')", "{v} *= 2"],
    "array of Python": ["{v}.append(i)", "{v} += {v}", "{v}[0] = i", "r = {v}.pop()", "{v}[0] += 1", "{v} *= 2"],
    "object": _KINDS["objects"],
    "namespace": _KINDS["objects"],
}
"""Per container what may be done to it in the place of ``{v}``; what goes for all of them comes on top."""


class Holder(nn.Module):
    shared: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table, self.items = types.SimpleNamespace(), {}, [None]


PLACES: dict[str, tuple[str, str, str]] = {
    # an expression, what puts a container there, and a line at the beginning of the step
    "attribute": ("h.held", "h.held = value", ""),
    "of an object": ("h.inner.held", "h.inner.held = value", ""),
    "entry": ("h.table['v']", "h.table['v'] = value", ""),
    "item": ("h.items[0]", "h.items[0] = value", ""),
    "class": ("Holder.shared", "Holder.shared = value", ""),
    "global": ("HELD", "global HELD; HELD = value", "global HELD"),
    "entry of a global": ("TABLE['v']", "TABLE['v'] = value", ""),
    "local": ("v", "h.held = value", "v = h.held"),
    "argument": ("argument", "global ARGUMENT; ARGUMENT = value", ""),
    "in an argument": ("argument['v']", "global ARGUMENT; ARGUMENT = {'v': value}", ""),
}

_SOURCE = """
def put(value):
    {put}

def change(v, i, x):
    r = 0
    {helped}
    return r, v

def step(x, i, argument):
    {begin}
    r = 0
    {statement}
    return x * 2, r, {last}

def held(argument):
    {begin}
    return {expression}
"""


def check(container: str, statement: str, place: str, *, helper: bool = False, breaks: bool = False) -> str | None:
    """What a compiled step leaves otherwise than Python, or nothing.

    Args:
        container: of :data:`CONTAINERS`.
        statement: done to it in each of five calls.
        place: of :data:`PLACES`.
        helper: a function that the step calls does it.
        breaks: the graph breaks before.
    """
    expression, put, begin = PLACES[place]
    done = f"r, {expression} = change({expression}, i, x)" if helper else statement.format(v=expression)
    if breaks:
        begin = f"{begin}\n    torch._dynamo.graph_break()"
    last = expression if place == "local" else "None"
    source = _SOURCE.format(
        put=put, begin=begin, statement=done, expression=expression, last=last, helped=statement.format(v="v")
    )
    sides = []
    for _ in range(2):
        scope: dict[str, Any] = {
            "torch": torch, "np": np, "collections": collections, "h": Holder(), "HELD": None, "TABLE": {},
            "ARGUMENT": None, "Holder": type("Holder", (), {}),
        }  # fmt: skip
        exec(source, scope)
        scope["put"](CONTAINERS[container]())
        sides.append((scope, scope["step"]))
    torch._dynamo.reset()
    sides[1] = sides[1][0], torch.compile(sides[1][1], backend="eager")
    x, told = torch.tensor([1.0, -1.0]), []
    for i in range(1, 6):
        answers = []
        for scope, function in sides:
            try:
                found = function(x, i, scope["ARGUMENT"])[1:]
            except Exception as error:
                found = type(error).__name__
            answers.append(f"{_shown(found)}, leaving {_shown(scope['held'](scope['ARGUMENT']))}")
        told.append(answers)
        if answers[0] != answers[1]:
            how = f"{', by a function' * helper}{', behind a break' * breaks}"
            return (
                f"{container!r}, {statement!r}, {place!r}{how}: {answers[1]} instead of {answers[0]}, after {told[:-1]}"
            )
    return None


def _shown(found: Any) -> str:
    """Type and contents; sets in one order, numbers of NumPy's with 64 bits as Python's."""
    if isinstance(found, np.float64):
        found = float(found)
    if isinstance(found, (set, frozenset)):
        return f"{type(found).__name__} {sorted(found, key=str)}"
    if isinstance(found, tuple):
        return f"({', '.join(map(_shown, found))})"
    return f"{type(found).__name__} {found!r}"


def draw(seed: int) -> str | None:
    """Check a random combination."""
    rng = random.Random(seed)
    container = rng.choice(list(CONTAINERS))
    statement = rng.choice(STATEMENTS.get(container, []) * 3 + _KINDS["all"])
    return check(
        container,
        statement,
        rng.choice(list(PLACES)),
        helper=rng.random() < 0.25 and not statement.startswith(("for", "if", "while")),
        breaks=rng.random() < 0.2,
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)
    with Preparation().throughout():
        search(draw, "combinations", __doc__)
