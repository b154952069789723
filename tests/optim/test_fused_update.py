"""Adam by torch's fused kernel does what the rule's formula says, in all modes of the configuration."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_ort.optim.rules import SGD, Adam, FusedAdam

SHAPES = [(33, 7), (129,), (), (0,), (4, 3, 2)]
GROUPS = [0, 1, 0, 1, 1]


def problem(dtype):
    torch.manual_seed(0)
    params = [torch.randn(s, dtype=dtype) for s in SHAPES]
    return params, [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]


def settings(lr, count, decay, bias_correction, scaled_epsilon):
    modes = {"bias_correction": bias_correction, "scaled_epsilon": scaled_epsilon}
    return (lr, 0.8, 0.95, 1e-3, decay, count), modes


def fused_numbers(given, modes):
    lr, *rest, count = given
    return FusedAdam.formula(*rest, **modes)(lr, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("scaled_epsilon", [True, False])
@pytest.mark.parametrize("clip", [True, False])
def test_follows_the_formula(dtype, bias_correction, scaled_epsilon, clip):
    params, states = problem(dtype)
    exact = [p.clone().double() for p in params]
    exact_states = [[s.clone().double() for s in ss] for ss in states]
    update = FusedAdam(params, states, GROUPS, clip=clip, guard=True)
    # an epsilon that is not scaled belongs to a decay after the update, which the kernel does not do
    decays = (0.1, 0.0) if scaled_epsilon else (0.0, 0.0)
    for count in (1, 2, 3):
        lr = 0.01 * count
        numbers = [settings(lr, count, decay, bias_correction, scaled_epsilon) for decay in decays]
        for group, (given, modes) in enumerate(numbers):
            update.set_coefficients(group, fused_numbers(given, modes))
        gradients = [torch.randn(s, dtype=dtype) for s in SHAPES]
        gradients[0] = torch.randn(7, 33, dtype=dtype).t()
        copies = [g.clone().double() for g in gradients]
        assert update.run([4 * g for g in gradients], scale=0.25, limits=[3.0, 1e9]) is True
        norm = sum(g.square().sum() for g in copies).sqrt()
        for i, (p, g, group) in enumerate(zip(exact, copies, GROUPS, strict=True)):
            factor = torch.tensor(3.0 / float(norm) if clip and group == 0 else 1.0, dtype=torch.float64)
            given, modes = numbers[group]
            c = dict(
                zip(Adam.coefficients, torch.tensor(Adam.numbers(*given, **modes), dtype=torch.float64), strict=True)
            )
            exact[i], *exact_states[i] = Adam("before").formula(p, g, factor, exact_states[i], c)
    bound = 1e-12 if dtype == torch.float64 else 1e-6
    for got, expected in zip(params, exact, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=bound * 4)
    for got, expected in zip(states, exact_states, strict=True):
        for s, e in zip(got, expected, strict=True):
            torch.testing.assert_close(s.double(), e, rtol=bound, atol=bound)


def test_is_torchs_adamw_to_the_last_bit():
    params, states = problem(torch.float32)
    theirs = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = torch.optim.AdamW(theirs, lr=0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, fused=True)
    update = FusedAdam(params, states, [0] * len(params))
    for count in (1, 2, 3):
        for p in theirs:
            p.grad = torch.randn_like(p)
        given, modes = settings(0.01, count, 0.1, True, True)
        update.set_coefficients(0, fused_numbers(given, modes))
        update.run([p.grad for p in theirs])
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, theirs, strict=True))


def test_gradients_that_are_not_finite_change_nothing():
    params, states = problem(torch.float32)
    update = FusedAdam(params, states, [0] * len(params), guard=True)
    given, modes = settings(0.1, 1, 0.1, True, True)
    update.set_coefficients(0, fused_numbers(given, modes))
    before = [t.clone() for t in params + [s for ss in states for s in ss]]
    for bad in (math.inf, math.nan):
        gradients = [torch.randn_like(p) for p in params]
        gradients[1][5] = bad
        assert update.run(gradients) is False
        assert all(torch.equal(a, b) for a, b in zip(params + [s for ss in states for s in ss], before, strict=True))


def test_a_learning_rate_of_zero_leaves_the_weights():
    params, states = problem(torch.float32)
    before = [p.clone() for p in params]
    update = FusedAdam(params, states, [0] * len(params))
    for scaled in (True, False):
        given, modes = settings(0.0, 1, 0.0, True, scaled)
        update.set_coefficients(0, fused_numbers(given, modes))
        update.run([torch.ones_like(p) for p in params])
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert float(states[0][0].abs().min()) > 0


def test_where_it_is_used():
    params, _ = problem(torch.float32)
    fastest, kept = "fastest", "onnxruntime"
    assert FusedAdam.can_do(Adam("before"), params, fastest)
    assert FusedAdam.can_do(Adam("none"), params, fastest)
    assert not FusedAdam.can_do(Adam("before"), params, kept)
    assert not FusedAdam.can_do(Adam("after"), params, fastest)
    assert not FusedAdam.can_do(SGD(), params, fastest)
    assert not FusedAdam.can_do(Adam("none"), [torch.randn(3, 4).t()], fastest)
    assert not FusedAdam.can_do(Adam("none"), [torch.randn(3).half()], fastest)
