"""A third of the statements, with the settings of steps; `make fuzz` has the rest."""

from __future__ import annotations

import contextlib

import pytest

from lightning_ort.compiler import plain_values

from .statements import STATEMENTS, TENSOR_STATEMENTS, check

pytestmark = [pytest.mark.either_build, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("part", range(8))
def test_statements(part):
    failures = [failure for statement in STATEMENTS[part::24] if (failure := check(statement)) is not None]
    assert not failures, "\n\n".join(failures)


def test_tensors():
    failures = [f for statement in TENSOR_STATEMENTS[::6] if (f := check(statement, "lightning_ort")) is not None]
    assert not failures, "\n\n".join(failures)


def test_that_the_tester_sees_what_is_wrong(monkeypatch):
    """Dynamo by itself keeps one entry too many in a full queue."""
    monkeypatch.setattr(plain_values, "left_to_python", contextlib.nullcontext)
    failure = check("self.maxq.append(i); return x * sum(self.maxq)")
    assert failure is not None and "call 4" in failure
