"""Every test starts from the same seed, with nothing compiled."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import itertools
import logging
import os
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch._dynamo

from lightning_ort.compiler.contest import MEMORY
from lightning_ort.compiler.trace_cache import TRACES

# what runs where shall follow from the graph alone; tests of measuring switch it on
os.environ.setdefault("LIGHTNING_ORT_MEASURE", "0")
# two threads, or one each where pytest-xdist runs a test on each core
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
# Dynamo measures the guards of each graph for its logs, behind 32 MiB that it writes to empty the caches: 20 ms
torch._dynamo.guards.profile_guard_manager = lambda *arguments: 0.0
# pytest captures what torch notes of each compilation, graphs included, for tools of its own
torch._logging._internal.trace_log = logging.Logger("nobody listens to")

_TESTS = itertools.count(1)


def _read_once() -> None:
    """torch's exporter reads its table of operators, which never changes, for each export: half a second."""
    if importlib.util.find_spec("onnxscript") is None:
        return
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    tables = functools.cache(ONNXRegistry.from_torchlib)

    def from_torchlib(**opset: int) -> ONNXRegistry:
        table = copy.copy(tables(**opset))
        table.functions = {target: [*functions] for target, functions in table.functions.items()}
        return table

    ONNXRegistry.from_torchlib = staticmethod(from_torchlib)


_read_once()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run once what would take its time twice in `make test`."""
    if importlib.util.find_spec("onnxruntime.training") is None:
        return
    skip = pytest.mark.skip(reason="runs on the stock build")
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        # what torch runs is the same beside any ONNX Runtime
        in_torch = str(parameters.get("placement")).startswith("torch")
        if in_torch or item.get_closest_marker("stock_only") is not None:
            item.add_marker(skip)


def _keep_the_collector_from_what_there_is() -> None:
    """It looks at everything again and again: on its own account, for callbacks of Lightning, for lists of a step."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    _keep_the_collector_from_what_there_is()


def _with_room(function: Callable[..., object], /, **arguments: object) -> None:
    function(**arguments)


# Python 3.11 keeps the frames of calls in pieces of 16 KB, and maps a piece anew for each call that crosses the end of
# one, which a compiler's recursion does thousands of times. A frame of half a megabyte is given a piece of a whole one,
# and those above it lie in the rest
_with_room.__code__ = _with_room.__code__.replace(co_stacksize=(1 << 16) + 1024)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Have pytest run a test where calls have room: a tenth of the time of random programs."""
    pyfuncitem.obj = functools.partial(_with_room, pyfuncitem.obj)


@pytest.fixture(autouse=True)
def fresh_state():
    """Reset what one test could hand on to the next."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch._dynamo.reset()
    TRACES.clear()
    yield
    torch._dynamo.reset()
    # Dynamo keeps a thousand objects of each test for good, in the end two millions
    if next(_TESTS) % 20 == 0:
        _keep_the_collector_from_what_there_is()


@pytest.fixture
def measuring(monkeypatch, tmp_path):
    """Who is fastest is measured, and nothing is known of it."""
    monkeypatch.setenv("LIGHTNING_ORT_MEASURE", "1")
    monkeypatch.setenv("LIGHTNING_ORT_CACHE_DIR", str(tmp_path / "cache"))
    MEMORY.forget()
    yield
    MEMORY.forget()


@pytest.fixture
def checked_distributions(monkeypatch):
    """As in a process in which nobody has called ``torch.compile`` by himself, which switches their checks off."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)


@pytest.fixture
def two_threads():
    """Two threads of torch, also where pytest-xdist gives each test one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def races(monkeypatch):
    """Decide races by a table of milliseconds, not by a clock; gives that and the list of races that were run."""
    from lightning_ort.compiler import contest

    table, seen = {"onnxruntime": 2.0, "torch": 1.0, "eager": 2.0}, []

    def pretend(runs, **limits):
        seen.append(sorted(runs))
        for run in runs.values():
            run()
        return {name: table[name] / 1e3 for name in runs}

    monkeypatch.setattr(contest, "race", pretend)
    return table, seen
