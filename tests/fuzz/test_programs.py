"""A fixed selection of random programs, other ones on each build of ONNX Runtime; `make fuzz` has the rest."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from .making import make
from .programs import Failure, check
from .steps import Case, Program, cases, fresh_state, run

_FIRST = 0 if importlib.util.find_spec("onnxruntime.training") is None else 500


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(_FIRST, _FIRST + 25))
def test_random_program(seed):
    failure = check(make(seed))
    assert failure is None, str(failure)


def test_that_the_tester_sees_a_wrong_gradient(monkeypatch):
    """A program whose compiled form is off in one entry of a gradient fails."""
    program = Program(0, torch.float64, ["t0 = torch.tanh(x @ self.w)", "loss = t0.sum()"], ["loss"])
    assert check(program, verify=False, calls=[Case(6)]) is None
    real = torch.compile

    def sabotaged(function, **kwargs):
        compiled = real(function, **kwargs)

        def step(state, x, *others):
            x.register_hook(lambda gradient: gradient * torch.linspace(1, 1 + 1e-8, 4, dtype=gradient.dtype))
            return compiled(state, x, *others)

        return step

    monkeypatch.setattr(torch, "compile", sabotaged)
    failure = check(program, verify=False, calls=[Case(6)])
    assert isinstance(failure, Failure)
    assert failure.kind == "wrong"
    assert "gradient of x" in failure.detail


def test_programs_follow_from_their_seed():
    programs = [make(3, length=12) for _ in range(2)]
    assert programs[0].source == programs[1].source
    results = [run(p, p.function(), fresh_state(p.dtype), case, 1) for p in programs for case in cases(p)[:1]]
    assert torch.equal(results[0]["result loss"], results[1]["result loss"])
