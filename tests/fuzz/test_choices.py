"""A fixed selection of what steps choose by; `make fuzz` has the rest."""

from __future__ import annotations

import logging

import pytest
import torch

from lightning_ort.compiler.dynamo import Preparation

from .choices import check, draw

pytestmark = pytest.mark.stock_only

# what has been wrong, and what rests on it
FOUND = [
    ("keys", "its keys"), ("order", "its keys"), ("order", "first of its keys"), ("emptied keys", "truth"),
    ("defaultdict", "truth"), ("range", "unpacked"), ("int", "formatted"), ("float", "formatted"), ("int", "format"),
    ("object", "text"), ("frozen", "text"), ("class", "text"), ("point", "repr"), ("layers", "text"), ("array", "text"),
    ("date", "in a set"), ("path", "a key"), ("sized", "in a dict"), ("method", "a part of a key"), ("method", "equal"),
    ("tensor", "in a dict"), ("parameter", "a part of a key"), ("np.float32", "repr"),
    ("emptied keys", "not"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def as_in_a_step(caplog):
    caplog.set_level(logging.CRITICAL, logger="torch._dynamo")
    with Preparation().throughout():
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("value", "question"), FOUND)
@pytest.mark.parametrize("place", ["attribute", "tuple", "argument"])
def test_what_was_wrong(value, question, place):
    assert check(value, question, place) is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(8))
def test_random_choices(seed):
    failures = [failure for k in range(15) if (failure := draw(100 * seed + k))]
    assert not failures, "\n".join(failures)


def test_that_the_tester_sees_what_nothing_watches(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda step, backend: lambda x, _: x * (3.0 if seen(step) else 0.25))
    first = {}

    def seen(step):
        return first.setdefault("chosen", step.__globals__["h"].chosen) == 3

    failure = check("int", "equal", "attribute")
    assert failure is not None
    assert "[3.0, -3.0] instead of [0.25, -0.25]" in failure
