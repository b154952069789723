"""A fixed selection of random changes between calls; `make fuzz` has the rest."""

from __future__ import annotations

import pytest
import torch

from . import changes
from .changes import CHANGES, check

pytestmark = pytest.mark.either_build


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(6))
def test_random_changes(seed):
    failure = check(seed)
    assert failure is None, failure


def test_that_the_tester_sees_a_change_that_is_missed(monkeypatch):
    """What is compiled once and for all goes on with the factor it has seen."""

    def once(function, **kwargs):
        factor = function.factor

        def step(x, rows):
            now, function.factor = function.factor, factor
            try:
                return function(x, rows)
            finally:
                function.factor = now

        return step

    monkeypatch.setattr(torch, "compile", once)
    monkeypatch.setattr(changes, "CHANGES", {name: CHANGES[name] for name in ("nothing", "factor")})
    failure = check(1)
    assert failure is not None
    assert "output 0: off by" in failure
