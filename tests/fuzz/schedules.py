"""Numbers that a step computes of counters and attributes, and what it does with them.

``python -m tests.fuzz.schedules --seconds 600`` draws expressions until the time is over and prints those of which a
compiled function makes something else than Python does.
"""

from __future__ import annotations

import logging
import math
import os
import random
import types
import warnings
from typing import Any

import torch
import torch.nn.functional as F

from lightning_ort.compiler.dynamo import Preparation

from .changes import search

__all__ = ["USES", "check", "draw"]

_LEAVES = ["i", "i", "i", "s.whole", "s.whole", "x.shape[0]", "s.part", "s.part", "s.other"]
_NUMBERS = ["1", "2", "3", "5", "7", "10", "100", "0.1", "0.2", "0.29", "0.7", "1.1", "0.01", "1 / 3", "2.5", "100.0"]
_FORMS = [
    "({a} + {b})", "({a} - {b})", "({a} * {b})", "({a} * {b})", "({a} / (1 + abs({b})))", "({a} // (1 + abs({b})))",
    "({a} % (1 + abs({b})))", "min({a}, {b})", "max({a}, {b})", "abs({a})", "round({a})", "round({a}, 1)", "int({a})",
    "float({a})", "math.floor({a})", "math.ceil({a})", "math.trunc({a})", "math.sqrt(abs({a}))", "math.exp(-abs({a}))",
    "math.sin({a})", "math.log(1 + abs({a}))", "(abs({a}) ** 0.5)", "(({a}) ** 2)", "(-{a})", "({a} if {b} > 1 else 2)",
    "({a} and {b} or 1)", "(1 + ({a} > {b}))", "(int({a}) & 3)", "divmod({a}, 1 + abs({b}))[1]", "({a} % 1.0)",
    "math.fmod({a}, 1.5)", "math.exp({a})", "math.log({a})", "math.erf({a})", "math.log1p({a})", "({a} / {b})",
    "math.sqrt({a})", "(({a} // 0.3) * {b})",
]  # fmt: skip
USES = [
    "x * {e}", "x + {e}", "x[:, : 1 + int(abs({e})) % 5]", "torch.arange(1 + int(abs({e})) % 4).sum() * x",
    "torch.zeros(1 + int(abs({e})) % 4).add({e})", "x * (2.0 if {e} > 0.5 else 0.5)",
    "x * (2.0 if {e} == {d} else 0.5)",
    "sum(x * k for k in range(int(abs({e})) % 4)) + x", "x * [1.0, 2.0, 3.0, 4.0][int(abs({e})) % 4]",
    "F.pad(x, (0, int(abs({e})) % 3)).mean(1)", "x.roll(int({e}) % 4, 1)", "x.topk(1 + int(abs({e})) % 4, 1)[0]",
    "x * float('%.3f' % ({e}))", "F.dropout(x, (abs({e}) % 1.0) * 0.9, True)", "x.clamp(max={e})",
    "torch.full((2,), {e}) + x.sum()", "x.add(x, alpha={e})", "F.huber_loss(x, x * 0, delta=abs({e}) + 0.1)",
    "F.huber_loss(x, x * 0, delta=0.1 + 0.1 * min(abs(int({e})), 2))", "torch.tensor({e}) * x",
    "torch.tensor([{e}, {d}]).sum() * x", "x ** (1 + int(abs({e})) % 3)", "torch.where(x > {e}, x, 2 * x)",
    "x.repeat(1 + int(abs({e})) % 2, 1)", "x * {{0: 1.0, 1: 2.0}}.get(int({e}) % 3, 4.0)", "x.select(1, int({e}) % 4)",
    "x.narrow(1, 0, 1 + int(abs({e})) % 4)", "torch.linspace(0, {e}, 3)", "F.layer_norm(x, (4,), eps=abs({e}) + 1e-3)",
    "x.chunk(1 + int(abs({e})) % 2, 1)[0]", "x * len(str(int({e})))", "F.elu(x, alpha=abs({e}) + 0.1)",
    # of which the last digit decides
    "x * (2.0 if {e} * 10 >= {d} else 0.5)", "x * (2.0 if {d} + {e} - {d} == {e} else 0.5)", "x * int({e} * 10)",
    "x * (2.0 if {e} * 3 - {e} == 2 * {e} else 0.5)", "x + math.floor((1 - {e} / 10) * 10)",
    "x.abs() ** (1 + abs({e}))", "x.lerp(x + 1, {e})", "F.leaky_relu(x, 0.3 * {e})",
    "x[:, : 1 + int((1 - {e} * 0.1) * 10) % 4]",
]  # fmt: skip
"""Steps with numbers in the places of ``{e}`` and ``{d}``."""
_ERRORS_OF_NUMBERS = ("ZeroDivisionError", "OverflowError")
_CALLS = [0, 1, 2, 3, 4, 5, 6, 2, 0, 9, 3, 1]


def _expression(rng: random.Random, depth: int) -> str:
    if not depth or rng.random() < 0.2:
        return rng.choice(_LEAVES if rng.random() < 0.65 else _NUMBERS)
    return rng.choice(_FORMS).format(a=_expression(rng, depth - 1), b=_expression(rng, depth - 1))


def check(use: str, backend: str = "lightning_ort") -> str | None:
    """How a compiled step goes otherwise than Python in one of twelve calls, or nothing.

    Args:
        use: an expression of ``x``, a tensor of two or three rows, of ``i``, which counts, and of numbers of ``s``.
        backend: of ``torch.compile``; graphs hold some of the numbers, so that it matters.
    """
    scope: dict[str, Any] = {"torch": torch, "F": F, "math": math}
    exec(f"def step(x, s, i):\n    return {use}\n", scope)
    torch._dynamo.reset()
    step, state = scope["step"], types.SimpleNamespace()
    compiled = torch.compile(step, backend=backend)
    for number, i in enumerate(_CALLS):
        state.whole = (3 * number) % 7
        state.part = [0.1, 0.2, 0.30000000000000004, 0.7, 1.5, -0.25][number % 6]
        state.other = [2.0, 3.0, -1.0, 0.29][number % 4]
        x = torch.linspace(-1.5, 2, (2 + number % 2) * 4).view(-1, 4)
        answers = []
        for function in (step, compiled):
            torch.manual_seed(0)
            try:
                answers.append(function(x, state, i))
            except Exception as error:
                answers.append(f"{type(error).__name__}: {error}"[:200])
        wanted, got = answers
        if isinstance(wanted, str):
            kind = wanted.partition(":")[0]
            if kind in _ERRORS_OF_NUMBERS and not (isinstance(got, str) and got.startswith(kind)):
                return f"{use}, call {number}, i = {i}, {vars(state)}: {got} instead of {wanted}"
            continue  # what torch refuses may be answered
        if isinstance(got, str) or (got.shape, got.dtype) != (wanted.shape, wanted.dtype) or not _close(got, wanted):
            where = f"call {number}, i = {i}, {vars(state)}"
            return f"{use}, {where}: {got} instead of {wanted}"
    return None


def _close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(got, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


def draw(seed: int) -> str | None:
    """Check a random use of random numbers."""
    rng = random.Random(seed)
    return check(rng.choice(USES).format(e=_expression(rng, rng.randint(1, 3)), d=_expression(rng, 1)))


if __name__ == "__main__":
    os.environ.setdefault("LIGHTNING_ORT_MEASURE", "0")
    warnings.simplefilter("ignore")
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)
    with Preparation().throughout():
        search(draw, "expressions", __doc__)
