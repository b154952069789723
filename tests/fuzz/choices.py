"""Steps that choose by a value that changes between calls: where it lies, what it is, and how it is asked.

``python -m tests.fuzz.choices --seconds 600`` draws combinations until the time is over and prints those of which a
compiled function makes something else than Python does. Graphs run as they are: it is what Dynamo watches that is
tested, and what makes up for it.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import logging
import math
import pathlib
import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_ort.compiler.dynamo import Preparation

from .changes import search

__all__ = ["PLACES", "QUESTIONS", "VALUES", "check", "draw"]


class Phase(enum.Enum):
    WARMUP, MAIN = "warmup", "main"


class Level(enum.IntEnum):
    LOW, HIGH = 1, 2


class Choice(enum.Flag):
    ONE, TWO = enum.auto(), enum.auto()


class Named(str, enum.Enum):
    ONE, TWO = "one", "two"


class Pair(tuple):
    __slots__ = ()


@dataclasses.dataclass(frozen=True)
class Frozen:
    weight: float


@dataclasses.dataclass
class Open:
    weight: float


class Plain:
    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def method(self) -> float:
        return self.weight

    def other(self) -> float:
        return 2 * self.weight


class Sized(Plain):
    def __len__(self) -> int:
        return int(self.weight)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sized) and self.weight == other.weight

    def __hash__(self) -> int:
        return hash(self.weight)


class Slotted:
    __slots__ = ("value",)


Point = collections.namedtuple("Point", "x y")
PLAIN = Plain(3.0)


def half(x: Any) -> Any:
    return x / 2


def whole(x: Any) -> Any:
    return x


VALUES: dict[str, tuple[Any, Any]] = {
    "int": (3, 4),
    "zero": (0, 1),
    "negative": (-1, 2),
    "large": (2**40, 3),
    "bool": (True, False),
    "bool and int": (True, 1),
    "int and float": (2, 2.0),
    "float": (0.5, 1.5),
    "infinity": (0.5, math.inf),
    "none": (None, 2),
    "str": ("one", "two"),
    "empty": ("", "one"),
    "bytes": (b"1", b"2"),
    "complex": (1j, 2j),
    "member": (Phase.WARMUP, Phase.MAIN),
    "level": (Level.LOW, Level.HIGH),
    "level and int": (Level.LOW, 2),
    "flag": (Choice.ONE, Choice.ONE | Choice.TWO),
    "named": (Named.ONE, Named.TWO),
    "named and str": (Named.ONE, "two"),
    "class": (Plain, Sized),
    "function": (half, whole),
    "function of torch": (torch.relu, torch.tanh),
    "partial": (math.sqrt, math.exp),
    "method": (PLAIN.method, PLAIN.other),
    "tuple": ((1, 2), (1, 3)),
    "longer": ((1, 2), (1, 2, 3)),
    "point": (Point(1, 2), Point(2, 2)),
    "list": ([1, 2], [2, 2]),
    "emptied": ([1, 2], []),
    "dict": ({"a": 1}, {"a": 2}),
    "keys": ({"a": 1}, {"b": 1}),
    "emptied keys": ({"a": 1}, {}),
    "order": ({"a": 1, "b": 1}, {"b": 1, "a": 1}),
    "set": ({1, 2}, {1, 3}),
    "frozenset": (frozenset({1, 2}), frozenset({1})),
    "range": (range(3), range(4)),
    "slice": (slice(0, 1), slice(0, 2)),
    "deque": (collections.deque([1, 2]), collections.deque([3])),
    "counter": (collections.Counter("aab"), collections.Counter("b")),
    "defaultdict": (collections.defaultdict(int, a=1), collections.defaultdict(int)),
    "np.int64": (np.int64(3), np.int64(4)),
    "np.float32": (np.float32(0.5), np.float32(1.5)),
    "array": (np.array([1.0, 2.0]), np.array([2.0, 2.0])),
    "date": (datetime.date(2020, 1, 1), datetime.date(2021, 1, 1)),
    "duration": (datetime.timedelta(1), datetime.timedelta(2)),
    "decimal": (decimal.Decimal("0.5"), decimal.Decimal("1.5")),
    "fraction": (fractions.Fraction(1, 2), fractions.Fraction(3, 2)),
    "path": (pathlib.PurePosixPath("a"), pathlib.PurePosixPath("b")),
    "dtype": (torch.float32, torch.float64),
    "device": (torch.device("cpu"), torch.device("meta")),
    "size": (torch.Size([1, 2]), torch.Size([2, 2])),
    "tensor": (torch.tensor(1.0), torch.tensor(2.0)),
    "parameter": (nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(2.0))),
    "layer": (nn.ReLU(), nn.Tanh()),
    "layers": (nn.ModuleList([nn.ReLU()]), nn.ModuleList([nn.ReLU(), nn.ReLU()])),
    "object": (Plain(1.0), Plain(2.0)),
    "sized": (Sized(1.0), Sized(2.0)),
    "namespace": (types.SimpleNamespace(weight=1.0), types.SimpleNamespace(weight=2.0)),
    "frozen": (Frozen(1.0), Frozen(2.0)),
    "open": (Open(1.0), Open(2.0)),
    "kinds": (1, "one"),
}
"""Two values each, of which a third is a copy of the first."""

QUESTIONS = {
    "equal": "{v} == FIRST",
    "unequal": "FIRST != {v}",
    "same": "{v} is FIRST",
    "none": "{v} is None",
    "true": "{v} is True",
    "of two": "{v} in (FIRST, 'other')",
    "in a list": "{v} in LIST",
    "in a set": "{v} in SET",
    "in a dict": "{v} in TABLE",
    "a key": "TABLE.get({v}, 2.0)",
    "an entry": "TABLE[{v}]",
    "a part of a key": "PAIRS.get(({v}, 1), 2.0)",
    "truth": "bool({v})",
    "not": "not {v}",
    "and": "({v} and 3.0) or 2.0",
    "kind": "isinstance({v}, type(FIRST))",
    "number": "isinstance({v}, (int, float))",
    "exactly": "type({v}) is type(FIRST)",
    "text": "str({v}) == str(FIRST)",
    "formatted": 'f"{{{v}}}" == f"{{FIRST}}"',
    "repr": "repr({v}) == repr(FIRST)",
    "length": "len({v})",
    "less": "{v} < SECOND",
    "at least": "{v} >= FIRST",
    "float": "float({v})",
    "int": "int({v})",
    "abs": "abs({v})",
    "sum": "sum({v})",
    "first": "{v}[0]",
    "last": "[*{v}][-1]",
    "unpacked": "(lambda *a: len(a))(*{v})",
    "sorted": "sorted({v})[0]",
    "any": "any({v})",
    "enumerated": "sum(i for i, _ in enumerate({v}))",
    "callable": "callable({v})",
    "called": "{v}(2.0)",
    "has": "hasattr({v}, 'weight')",
    "attribute": "getattr({v}, 'weight', 5.0)",
    "value": "{v}.value == getattr(FIRST, 'value', 0)",
    "weight": "{v}.weight",
    "entry of it": "{v}['a']",
    "entry or not": "{v}.get('a', 5.0)",
    "its keys": "[*{v}][0] == 'a'",
    "first of its keys": "list({v}.keys())[0] == 'a'",
    "its entries": "[k for k, _ in {v}.items()][0] == 'a'",
    "looped over": "sum(i * n for i, n in enumerate({v}))",
    "max": "max({v}, FIRST) == FIRST",
    "times": "{v} * 2.0",
    "power": "2.0 ** {v}",
    "round": "round({v})",
    "finite": "math.isfinite({v})",
    "sign": "math.copysign(1.0, {v})",
    "shape": "X.new_ones({v}).sum()",
    "dtype": "X.to({v}).dtype == torch.float64",
    "slice": "X[{v}].sum()",
    "with a tensor": "(X * {v}).sum()",
    "numel": "{v}.numel()",
    "layer": "{v}(X).sum()",
    "upper": "{v}.upper() == 'ONE'",
    "starts": "{v}.startswith('o')",
    "format": "'%s' % ({v},) == '%s' % (FIRST,)",
    "hash": "hash({v}) == hash(FIRST)",
}
"""Expressions with the value in the place of ``{v}``; a truth or a number."""


class Holder(nn.Module):
    fallback: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table, self.items, self.slotted = Plain(), {}, [None], Slotted()

    @property
    def shown(self) -> Any:
        return self.inner.weight

    def given(self) -> Any:
        return self.inner.weight


PLACES: dict[str, tuple[str, Callable[[dict[str, Any], Any], None]]] = {
    "attribute": ("h.chosen", lambda scope, value: scope["h"].__dict__.update(chosen=value)),
    "of an object": ("h.inner.weight", lambda scope, value: setattr(scope["h"].inner, "weight", value)),
    "property": ("h.shown", lambda scope, value: setattr(scope["h"].inner, "weight", value)),
    "result": ("h.given()", lambda scope, value: setattr(scope["h"].inner, "weight", value)),
    "entry": ("h.table['v']", lambda scope, value: scope["h"].table.update(v=value)),
    "another table": ("h.table['v']", lambda scope, value: setattr(scope["h"], "table", {"v": value})),
    "item": ("h.items[0]", lambda scope, value: scope["h"].items.__setitem__(0, value)),
    "tuple": ("h.pair[1]", lambda scope, value: scope["h"].__dict__.update(pair=(1, value))),
    "slot": ("h.slotted.value", lambda scope, value: setattr(scope["h"].slotted, "value", value)),
    "class": ("h.fallback", lambda scope, value: setattr(Holder, "fallback", value)),
    "by its class": ("Holder.fallback", lambda scope, value: setattr(Holder, "fallback", value)),
    "global": ("GLOBAL", lambda scope, value: scope.update(GLOBAL=value)),
    "of a global": ("OBJECT.weight", lambda scope, value: setattr(scope["OBJECT"], "weight", value)),
    "entry of a global": ("DICT['v']", lambda scope, value: scope["DICT"].update(v=value)),
    "default": ("default", lambda scope, value: setattr(scope["step"], "__defaults__", (value,))),
    "of a function": ("helper.value", lambda scope, value: setattr(scope["helper"], "value", value)),
    "default of another": ("helper()", lambda scope, value: setattr(scope["helper"], "__defaults__", (value,))),
    "closure": ("nested()", lambda scope, value: scope["change"](value)),
    "argument": ("argument", lambda scope, value: scope.update(ARGUMENT=value)),
    "in an argument": ("argument['v']", lambda scope, value: scope.update(ARGUMENT={"v": value})),
    "of a module": ("SETTINGS.value", lambda scope, value: setattr(scope["SETTINGS"], "value", value)),
}
"""An expression for the value in a step, and what puts one there."""

_SOURCE = """
def is_truth(found):
    return found is True or found is False or type(found).__name__ in ("bool", "Tensor", "Parameter")

def helper(value=None):
    return value

def make():
    cell = None
    def nested():
        return cell
    def change(value):
        nonlocal cell
        cell = value
    return nested, change

nested, change = make()

def step(x, argument, default=None):
    found = {question}
    if is_truth(found):
        return x * (3.0 if found else 0.25)
    return x * float(found)
"""


_BY_VALUE = (int, float, complex, str, bytes, tuple, list, frozenset, range, slice, np.generic, torch.device)
"""what Dynamo knows by its value, in some places, whichever object it is"""


def check(value: str, question: str, place: str) -> str | None:
    """How a compiled step answers otherwise than Python, or nothing."""
    first, second = VALUES[value]
    if question == "same" and isinstance(first, _BY_VALUE):
        return None
    scope: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "Holder": Holder,
        "h": Holder(),
        "GLOBAL": None,
        "X": torch.tensor([1.0, 2.0]),
        "FIRST": first,
        "SECOND": second,
        "OBJECT": Plain(),
        "DICT": {},
        "ARGUMENT": None,
        "SETTINGS": types.ModuleType("settings"),
        "LIST": [first, "other"],
    }
    try:
        scope |= {"SET": {first, "other"}, "TABLE": {first: 1.5}, "PAIRS": {(first, 1): 1.5}}
    except TypeError:  # it has no hash
        scope |= {"SET": {"other"}, "TABLE": {"other": 1.5}, "PAIRS": {}}
    expression, put = PLACES[place]
    exec(_SOURCE.format(question=QUESTIONS[question].format(v=expression)), scope)
    step, x = scope["step"], torch.tensor([1.0, -1.0])
    try:
        third = copy.deepcopy(first)
    except Exception:
        third = first
    compiled = torch.compile(step, backend="eager")
    torch._dynamo.reset()
    told = []
    for now in (first, second, first, third, second):
        put(scope, now)
        answers = []
        for function in (step, compiled):
            try:
                answers.append(function(x, scope["ARGUMENT"]).tolist())
            except Exception as error:
                answers.append(type(error).__name__)
        told.append(answers)
        expected, found = answers
        if isinstance(expected, str):
            continue  # what Python refuses may be answered
        if repr(expected) != repr(found):
            return f"{value!r}, {question!r}, {place!r}: {now!r}: {found} instead of {expected}, after {told[:-1]}"
    return None


def draw(seed: int) -> str | None:
    """Check a random combination."""
    rng = random.Random(seed)
    return check(*(rng.choice(list(kinds)) for kinds in (VALUES, QUESTIONS, PLACES)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)
    with Preparation().throughout():
        search(draw, "combinations", __doc__)
