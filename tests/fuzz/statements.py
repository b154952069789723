"""Statements of Python in a step: what Dynamo and this package make of them beside what Python does.

``python -m tests.fuzz.statements`` runs all of ``python_statements.txt`` and ``tensor_statements.txt``, bodies of
``step(self, x, i)`` between lines of ``---``, and prints those that give other results, gradients or attributes, or
leave other random states. The former are about Python's objects, and go through Dynamo alone; the latter are about
tensors, what shares their memory, and gradients, and go through ONNX Runtime. Names that a body uses are those of this
file.
"""

from __future__ import annotations

import argparse
import array
import bisect  # noqa: F401
import collections
import contextvars
import copy  # noqa: F401
import dataclasses
import datetime  # noqa: F401
import decimal
import enum
import fractions
import functools
import heapq  # noqa: F401
import itertools
import json  # noqa: F401
import linecache
import logging
import math  # noqa: F401
import operator  # noqa: F401
import queue
import random
import re  # noqa: F401
import statistics  # noqa: F401
import threading
import time
import types
import typing
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: F401
from torch import nn

from lightning_ort.compiler.dynamo import Preparation

__all__ = ["STATEMENTS", "TENSOR_STATEMENTS", "check"]


def _read(name: str) -> list[str]:
    return [text.strip("\n") for text in Path(__file__).with_name(name).read_text().split("---\n")]


STATEMENTS, TENSOR_STATEMENTS = _read("python_statements.txt"), _read("tensor_statements.txt")
_CALLS = 5


@dataclasses.dataclass
class DC:
    n: int = 0
    xs: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class FDC:
    n: int = 0


class Color(enum.Enum):
    R = 1
    G = 2


class Meter:
    def __init__(self) -> None:
        self.sum, self.n = 0.0, 0

    def update(self, value: float) -> None:
        self.sum += value
        self.n += 1

    @property
    def avg(self) -> float:
        return self.sum / max(self.n, 1)


class Slots:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 0, []


class Custom(dict):
    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value * 2)


class MyList(list):
    def append(self, value: Any) -> None:
        super().append(value + 1)


class Magic:
    def __init__(self) -> None:
        self.__dict__["d"] = {}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["d"].get(name, 0)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["d"][name] = value + 1


class Doubled:
    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return owner.__dict__.get("kept", 0)

    def __set__(self, owner: Any, value: Any) -> None:
        owner.__dict__["kept"] = value * 2


class HasDescriptor:
    v = Doubled()


class Threes:
    """Ends after three numbers, and goes on when it is asked again."""

    def __init__(self) -> None:
        self.i = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.i += 1
        if self.i % 4 == 0:
            raise StopIteration
        return self.i


class NT(typing.NamedTuple):
    a: int
    b: float


class Ctx:
    def __init__(self) -> None:
        self.log: list[str] = []

    def __enter__(self) -> Ctx:
        self.log.append("in")
        return self

    def __exit__(self, *error: object) -> None:
        self.log.append("out")


class Swallow:
    def __enter__(self) -> Swallow:
        return self

    def __exit__(self, *error: object) -> bool:
        return True


COUNT = 0
LOG: list[int] = []


def default_args(value: int, memo: dict[int, int] = {}) -> int:  # noqa: B006
    memo[value] = len(memo)
    return sum(memo.values())


class M(nn.Module):
    """What the statements read and write."""

    shared = 0
    registry: typing.ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)
        self.ml, self.pd = nn.ModuleList([nn.Linear(3, 3)]), nn.ParameterDict({"a": nn.Parameter(torch.ones(3))})
        for layer, value in ((self.b, 0.1), (self.ml[0], 0.2)):
            nn.init.constant_(layer.weight, value)
            nn.init.constant_(layer.bias, 0.1)
        self.register_buffer("buf", torch.zeros(3))
        # iterators
        self.cyc, self.cnt = itertools.cycle([1.0, 2.0, 3.0]), itertools.count()
        self.it = iter([1.0, 2.0, 3.0, 4.0, 5.0])
        self.gen, self.rev = (k for k in range(100)), reversed([1, 2, 3, 4, 5])
        self.ch, self.myit = itertools.chain([1, 2], [3, 4, 5]), Threes()
        self.zip_, self.en = zip([1, 2, 3, 4, 5], [5, 4, 3, 2, 1]), enumerate([5, 6, 7, 8, 9])  # noqa: B905
        self.mp = map(lambda v: v * 2, [1, 2, 3, 4, 5])  # noqa: C417
        # containers
        self.dd, self.ctr = collections.defaultdict(list), collections.Counter()
        self.od, self.cm = collections.OrderedDict(a=1, b=2, c=3), collections.ChainMap({}, {"a": 1})
        self.heap, self.sorted, self.st, self.tup, self.lst = [3, 1, 2], [1, 5, 9], {1, 2}, (1, 2), []
        self.d, self.d3, self.nest, self.memo = {}, {"a": 1, "b": 2, "c": 3}, {"a": {"b": [1, 2]}}, {}
        self.maxq, self.matrix, self.view = collections.deque([0] * 3, maxlen=3), [[0, 0], [0, 0]], self.d.items()
        self.dt, self.tl, self.hist = {"x": torch.zeros(3)}, [torch.zeros(3)], []
        self.ud, self.ul, self.ba = collections.UserDict(a=1), collections.UserList([1]), bytearray(b"ab")
        self.arr, self.q = array.array("d", [1.0, 2.0]), queue.SimpleQueue()
        # objects
        self.dc, self.fdc, self.meter, self.slots = DC(), FDC(), Meter(), Slots()
        self.custom, self.mylist, self.magic, self.desc = Custom(), MyList(), Magic(), HasDescriptor()
        self.ns, self.ctx, self.lock = types.SimpleNamespace(a=1, l=[]), Ctx(), threading.Lock()
        self.cv, self.weak, self.color = contextvars.ContextVar("cv", default=0), weakref.ref(self.b), Color.R
        self.part, self.methods, self.fnattr = functools.partial(torch.add, alpha=2), [self.helper], None
        # numbers
        self.n, self.f, self.flag, self.name_, self.none, self.cached_calls = 0, 0.5, False, "a", None, 0
        self.best, self.patience, self.tot, self.b64, self.big, self.c = float("inf"), 0, 0, 1 << 40, 10**30, 1 + 2j
        self.dec, self.fr = decimal.Decimal("0.5"), fractions.Fraction(1, 3)
        self.rng, self.gen_t = random.Random(0), torch.Generator().manual_seed(0)

    @property
    def prop(self) -> int:
        self.n += 1
        return self.n

    @functools.cached_property
    def cprop(self) -> float:
        self.cached_calls += 1
        return 2.0

    @staticmethod
    def stat(value: Any) -> Any:
        return value * 2

    @classmethod
    def klass(cls) -> int:
        cls.shared += 1
        return cls.shared

    def helper(self, value: Any) -> Any:
        self.n += 1
        return value * self.n


_CLASS = dict(vars(M))


def check(statement: str, backend: str = "eager") -> str | None:
    """How the statement goes otherwise than in Python, in a few lines; ``None`` if it does not."""
    function = _function(statement)
    wanted = _run(function)
    torch._dynamo.reset()
    with Preparation().throughout():
        found = _run(torch.compile(function, backend=backend))
    rows = zip([f"call {i}" for i in range(len(wanted) - 1)] + ["left"], wanted, found, strict=False)
    different = [f"  {name}: {b[:400]}\n  Python: {a[:400]}" for name, a, b in rows if a != b]
    return "\n".join([statement, *different]) if different else None


def _function(statement: str) -> Callable[..., Any]:
    name = f"<statement {hash(statement)}>"
    body = "\n".join(f"    {line}" for line in statement.splitlines())
    source = f"def step(self, x, i):\n{body}\n"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), globals())
    return globals()["step"]  # type: ignore[no-any-return]


def _run(function: Callable[..., Any]) -> list[str]:
    """What each call gives, and what all of them leave."""
    global COUNT
    COUNT = 0
    LOG.clear()
    default_args.__defaults__[0].clear()  # type: ignore[index]
    for name in vars(M).keys() - _CLASS.keys():
        delattr(M, name)
    M.shared, M.registry, DC.n = 0, [], 0
    torch.manual_seed(0)
    random.seed(0)
    module, rows = M(), []
    for i in range(_CALLS):
        x = (torch.arange(3.0) + i + 1).requires_grad_()
        try:
            y = function(module, x, i)
            if isinstance(y, torch.Tensor) and y.requires_grad:
                y.sum().backward()
            rows.append(str((_plain(y), _plain(x.grad))))
        except Exception as error:
            rows.append(type(error).__name__)
            break
    state = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    parameters = dict(module.named_parameters())
    gradients = {name: p.grad for name, p in parameters.items()}
    left = [state, parameters, gradients, dict(module.named_buffers()), COUNT, LOG, M.shared, M.registry]
    return [*rows, str([*map(_plain, left), random.random(), torch.rand(()).item()])]


def _plain(value: Any, depth: int = 0) -> Any:
    """A value as what can be compared, as far as it can be looked into."""
    if isinstance(value, torch.Tensor):
        # a zero has the sign of what was rounded away
        return str(value.dtype), [round(float(v), 4) + 0.0 for v in value.detach().flatten()]
    if isinstance(value, (int, float, str, enum.Enum, type(None))):
        return type(value).__name__, round(value, 5) if isinstance(value, float) else value
    if depth > 4 or isinstance(value, nn.Module):
        return type(value).__name__, getattr(value, "training", None)
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not str(k).startswith("_")}
        return type(value).__name__, [(k, _plain(v, depth + 1)) for k, v in kept.items()]
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)
    if isinstance(value, (list, tuple, collections.deque, collections.UserList)):
        return type(value).__name__, [_plain(v, depth + 1) for v in value]
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, torch.Generator):
        return int(value.get_state().sum())
    if isinstance(value, (decimal.Decimal, fractions.Fraction, bytearray, array.array)):
        return str(value)
    if isinstance(value, Slots):
        return value.a, value.b
    own = (DC, FDC, Meter, HasDescriptor, Threes, Ctx, Magic, types.SimpleNamespace, collections.UserDict)
    return (type(value).__name__, _plain(vars(value), depth + 1)) if isinstance(value, own) else type(value).__name__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", help="of torch.compile, for all of them; 'eager' is Dynamo alone")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    start, done, failed = time.monotonic(), 0, 0
    backends = [(s, "eager") for s in STATEMENTS] + [(s, "lightning_ort") for s in TENSOR_STATEMENTS]
    for statement, backend in backends:
        if time.monotonic() - start > options.seconds:
            break
        failure = check(statement, options.backend or backend)
        done += 1
        if failure is not None:
            failed += 1
            print(failure, flush=True)
    print(f"{done} statements, {failed} failed, {time.monotonic() - start:.0f} s")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
