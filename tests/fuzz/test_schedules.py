"""A fixed selection of numbers that steps compute; `make fuzz` has the rest."""

from __future__ import annotations

import logging

import pytest
import torch

from lightning_ort.compiler.dynamo import Preparation

from .schedules import check, draw

pytestmark = [pytest.mark.either_build, pytest.mark.filterwarnings("ignore")]

# what has been wrong
FOUND = [
    "F.huber_loss(x, x * 0, delta=0.1 + 0.1 * (i % 3))",
    "F.dropout(x, 0.1 + 0.01 * min(i, 5), True)",
    "F.huber_loss(x, x * 0, delta=0.1 + (s.whole * (3 / (1 + i))) % 1.0)",
    "x * (3.0 if (0.3 * i) % 1.0 > 0.5 else 2.0)",
    "x * (3.0 if (0.5 * i) % 1.0 == 0 else 2.0)",
    "x * (3.0 if s.part % 1.0 > 0.5 else 2.0)",
    "x * (3.0 if (0.1 * i) // 0.1 > 2 else 2.0)",
    "x * divmod(0.3 * i, 1.0)[1]",
    "x.narrow(1, 0, 1 + int(abs(0.3333333333333333 * i)) % 4)",
    "x * {0: 1.0, 1: 2.0}.get(int(math.exp(-(i % 2.1))), 4.0)",
    "F.huber_loss(x, x * 0, delta=0.1 + 0.1 * min(int(i % 1.29), 2))",
    "x * [1.0, 2.0, 3.0][int(i % (1 + math.exp(-10)))]",
    "x * (2.0 if s.part * 3 - s.part == 2 * s.part else 0.5)",
    "x * (2.0 if (s.part + 0.1) * 10 >= i else 0.5)",
    "x * int((1 - i / 10) * 10)",
    "x * float(int((1 - i * 0.1) * 10))",
    "F.dropout(x, 0.3 * (0.9 * abs(s.part)), True)",
]


@pytest.fixture(autouse=True)
def as_in_a_step(caplog):
    caplog.set_level(logging.CRITICAL, logger="torch._dynamo")
    with Preparation().throughout():
        yield


@pytest.mark.parametrize("use", FOUND)
@pytest.mark.parametrize("backend", ["eager", "lightning_ort"])
def test_what_was_wrong(use, backend):
    assert check(use, backend) is None


@pytest.mark.parametrize("seed", range(2))
def test_random_numbers(seed):
    failures = [failure for k in range(12) if (failure := draw(100 * seed + k))]
    assert not failures, "\n".join(failures)


def test_that_the_tester_sees_the_number_of_another_step(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "compile", lambda step, backend: lambda *args: seen.append(step(*args)) or seen[0])
    assert "call 1, i = 1" in str(check("x.mean() * i"))
