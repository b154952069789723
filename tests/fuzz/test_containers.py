"""A fixed selection of changes of containers; `make fuzz` has the rest."""

from __future__ import annotations

import logging

import pytest
import torch

from lightning_ort.compiler.dynamo import Preparation

from .containers import check, draw

pytestmark = [pytest.mark.either_build, pytest.mark.filterwarnings("ignore")]

# what has been wrong
FOUND = [
    ("array", "{v} += 1"), ("array", "{v}[...] = i"), ("matrix", "{v} *= 2"), ("masked", "{v} += 1"),
    ("integers", "{v} <<= 1"), ("array", "r = {v}.shape; {v} = np.zeros({v}.size + 1)"),
    ("number", "r = float({v}); {v} += 1"), ("own set", "{v}.add(i)"), ("own set", "{v} |= {{i}}"),
    ("own set", "{v}.clear()"), ("set", "w = {v}; w -= {{i}}"), ("own list", "{v} += [i]"),
    ("list", "{v} += np.ones(3)"), ("full deque", "w = {v}.copy(); w.append(i); r = len(w)"),
    ("bytearray", "{v} = {v} + {v}"), ("array of Python", "{v} = {v} + {v}"),
    ("counter", "{v} += collections.Counter([i])"), ("object", "del {v}.items"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def as_in_a_step(caplog, monkeypatch):
    caplog.set_level(logging.CRITICAL, logger="torch._dynamo")
    errors: list = []
    monkeypatch.setattr(torch._guards.log, "error", lambda *words, **_: errors.append(words))
    with Preparation().throughout():
        yield
    assert not errors, "a guard could not be made"


@pytest.mark.parametrize(("container", "statement"), FOUND)
@pytest.mark.parametrize(("place", "helper"), [("attribute", False), ("entry of a global", False), ("local", True)])
def test_what_was_wrong(container, statement, place, helper):
    assert check(container, statement, place, helper=helper) is None


@pytest.mark.parametrize("seed", range(3))
def test_random_changes(seed):
    failures = [failure for k in range(15) if (failure := draw(100 * seed + k))]
    assert not failures, "\n".join(failures)


def test_that_the_tester_sees_a_change_that_is_lost(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda step, backend: lambda x, *_: (x * 2, 0, None))
    assert "leaving list [3, 1, 2] instead of (int 0, NoneType None), leaving list [3, 1, 2, 1]" in str(
        check("list", "{v}.append(i)", "attribute")
    )
