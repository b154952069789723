"""Dropout masks that are drawn faster: torch's own bits, and its random state afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_ort.compiler import bernoulli
from lightning_ort.compiler.bernoulli import draw_bernoulli

pytestmark = pytest.mark.stock_only


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(bernoulli, "_faster", {})


def drawn(draw, *args):
    torch.manual_seed(3)
    torch.rand(5)  # somewhere within a block of the generator's numbers
    result = draw(*args)
    return result, torch.get_rng_state()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("p", "divisor"), [(0.9, 0.9), (0.5, 0.5), (0.3, None), (1e-9, None), (1 - 1e-12, 0.7)])
def test_bits_of_torch(monkeypatch, dtype, p, divisor):
    monkeypatch.setattr(bernoulli, "_PIECE", 64)
    for shape in ((), (0,), (1,), (63,), (64,), (5, 40)):
        wanted, end = drawn(bernoulli._as_torch, torch.empty(shape, dtype=dtype), p, divisor)
        for draw in (bernoulli._at_once, draw_bernoulli, draw_bernoulli):
            found, state = drawn(draw, torch.empty(shape, dtype=dtype), p, divisor)
            assert torch.equal(found, wanted)
            assert torch.equal(state, end)


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(4, 6).t(),
        torch.empty(4, 6, dtype=torch.int64),
        torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ],
    ids=["strides", "integers", "channels last"],
)
@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
def test_what_torch_draws_as_ever(out, p):
    """In the order of the memory, which follows strides."""
    wanted, end = drawn(lambda: out.clone().bernoulli_(p))
    found, state = drawn(lambda: draw_bernoulli(out.clone(), p))
    assert torch.equal(found, wanted) and torch.equal(state, end)
    assert not bernoulli._faster


@pytest.mark.parametrize(
    "wrong", [lambda out, p, divisor: out.fill_(1), lambda out, p, divisor: (torch.rand(1), out)[1]]
)
def test_another_torch_is_noticed(monkeypatch, wrong):
    """One that draws otherwise, as with MKL, goes on to draw by itself."""
    monkeypatch.setattr(bernoulli, "_at_once", wrong)
    wanted, end = drawn(bernoulli._as_torch, torch.empty(50_000), 0.5, 0.5)
    for _ in range(2):
        found, state = drawn(draw_bernoulli, torch.empty(50_000), 0.5, 0.5)
        assert torch.equal(found, wanted) and torch.equal(state, end)
    assert list(bernoulli._faster.values()) == [False]


def test_in_inference_mode():
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            wanted, _ = drawn(bernoulli._as_torch, torch.empty(70_000), 0.5, 0.5)
            found, _ = drawn(bernoulli._at_once, torch.empty(70_000), 0.5, 0.5)
            assert torch.equal(found, wanted)


def test_dropout_of_a_step(monkeypatch):
    """Large enough to be drawn in the other way; that is what a step does, with eager's bits."""
    monkeypatch.setattr(
        bernoulli, "_compared", lambda out, p, divisor: bool(bernoulli._as_torch(out, p, divisor).numel())
    )
    drop, seen = nn.Dropout(0.5), []
    at_once = bernoulli._at_once
    monkeypatch.setattr(bernoulli, "_at_once", lambda out, *rest: seen.append(out.shape) or at_once(out, *rest))

    def function(x):
        return drop(x * 2).square().sum()

    step = torch.compile(function, backend="lightning_ort", options={"placement": "torch"})
    for _ in range(3):
        gradients = []
        for f in (step, function):
            x = torch.ones(300, 300, requires_grad=True)
            torch.manual_seed(7)
            f(x).backward()
            gradients.append((x.grad, torch.get_rng_state()))
        for a, b in zip(*gradients, strict=True):
            assert torch.equal(a, b)
    assert set(seen) == {(300, 300)}
