"""Operators on numbers that are out of the ordinary: NaN, infinities, both zeros, denormals, ties.

Values and gradients of compiled functions are compared with eager's, element by element: which are NaN, which are
infinite and of which sign, and all others up to rounding, so that a gradient that took another way at a tie or at a
kink is seen.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "Case",
    "column",
    "differences",
    "images",
    "labelled",
    "pairs",
    "probabilities",
    "rows",
    "signals",
    "single",
    "spotted",
    "volumes",
    "with_other",
]

nan, inf = math.nan, math.inf
RTOL = {torch.float32: 2e-4, torch.float64: 1e-7}  # some kernels of eager hold constants in float32


@dataclasses.dataclass
class Case:
    name: str
    function: Callable[..., Any]
    data: Callable[[torch.dtype], Sequence[Sequence[Tensor]]]
    """element type to several lists of arguments of the same shapes; those of that type have gradients"""
    special: bool = True
    """whether gradients that arrive as NaN or infinite leave as in eager"""

    def __str__(self) -> str:
        return self.name


def listed(dtype: torch.dtype) -> Tensor:
    """Numbers of every kind."""
    small, large = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    kinks = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, 2.5, 2.0, -2.0, 3.0, -3.0, 6.0, 20.0, 21.0, -40.0]
    ends = [nan, inf, -inf, small, -small, small / 64, -small / 64, large, -large, large / 4, 1e10, -1e10, 100.0]
    return torch.tensor([*ends, *kinks, 0.3, -0.3, 0.7], dtype=dtype)


def single(dtype: torch.dtype) -> list[list[Tensor]]:
    return [[listed(dtype)]]


def pairs(dtype: torch.dtype) -> list[list[Tensor]]:
    """Each with each."""
    x = listed(dtype)
    return [[x[:, None].expand(32, 32).contiguous(), x[None].expand(32, 32).contiguous()]]


def rows(dtype: torch.dtype) -> list[list[Tensor]]:
    """Rows in which one, several or all are special."""
    tiny = torch.finfo(dtype).tiny / 64
    x = torch.tensor(
        [
            [0.3, -1.2, 2.5, 0.1, -0.7],
            [0.3, nan, 2.5, 0.1, -0.7],
            [0.3, -1.2, 2.5, 0.1, nan],
            [nan, -1.2, nan, 0.1, 3.0],
            [0.3, inf, 2.5, 0.1, -0.7],
            [0.3, -inf, 2.5, 0.1, -0.7],
            [inf, inf, 2.5, 0.1, -inf],
            [nan, inf, 2.5, 0.1, -inf],
            [-inf] * 5,
            [inf] * 5,
            [nan] * 5,
            [2.0, 1.0, 2.0, 1.0, 2.0],
            [0.0, -0.0, 0.0, -0.0, 0.0],
            [-0.0, 0.0, -0.0, -0.0, 0.0],
            [tiny, -tiny, 0.0, tiny, 2 * tiny],
            [0.0, 3.0, 0.0, 2.0, 5.0],
            [0.0, 3.0, 1.0, 2.0, 5.0],
            [0.0, nan, 1.0, 2.0, 0.0],
            [0.0, inf, 1.0, 2.0, 5.0],
            [1e30, 1e30, -1e30, 3.0, 1.0],
        ],
        dtype=dtype,
    )
    return [[x]]


def column(dtype: torch.dtype) -> list[list[Tensor]]:
    """One element."""
    return [[torch.tensor([[v]], dtype=dtype)] for v in (2.0, nan, inf, -inf, 0.0)]


def _spotted(dtype: torch.dtype, *shape: int) -> list[Tensor]:
    """Tensors with one special number, several, or nothing else."""
    g = torch.Generator().manual_seed(3)
    plain = torch.randn(*shape, generator=g, dtype=dtype)
    result = [plain]
    for spot in (nan, inf, -inf):
        for place in (0, plain.numel() // 2 - 2, plain.numel() - 1):
            x = plain.clone()
            x.view(-1)[place] = spot
            result.append(x)
    x = plain.clone()
    x.view(-1)[::3] = nan
    result.append(x)
    x = plain.clone()
    x.view(-1)[::5], x.view(-1)[1::7] = inf, -inf
    result.append(x)
    ties = torch.randint(0, 3, shape, generator=g).to(dtype)
    tiny = torch.finfo(dtype).tiny / 64
    return [*result, ties, torch.zeros(shape, dtype=dtype), torch.full(shape, -inf, dtype=dtype),
            torch.full(shape, nan, dtype=dtype), ties * tiny]  # fmt: skip


def spotted(*shape: int) -> Callable[[torch.dtype], list[list[Tensor]]]:
    return lambda dtype: [[x] for x in _spotted(dtype, *shape)]


def with_other(shape: Sequence[int], *others: Sequence[int]) -> Callable[[torch.dtype], list[list[Tensor]]]:
    """Each argument special in turn, beside ordinary ones."""

    def data(dtype: torch.dtype) -> list[list[Tensor]]:
        shapes = [shape, *others]
        each = [_spotted(dtype, *s) for s in shapes]
        result = [[e[0] for e in each]]
        for i, specials in enumerate(each):
            result += [[s if i == j else e[0] for j, e in enumerate(each)] for s in specials[1:]]
        return result

    return data


LABELS = torch.tensor([0, 4, 2, -100, 1, 1, 3, 2])


def labelled(dtype: torch.dtype) -> list[list[Tensor]]:
    return [[x, LABELS] for x in _spotted(dtype, 8, 5)]


def probabilities(dtype: torch.dtype) -> list[list[Tensor]]:
    x = torch.tensor([0.0, -0.0, 1.0, 0.5, 1e-35, 1e-30, 0.25, 1 - 1e-7], dtype=dtype)
    return [[x[:, None].expand(8, 8).contiguous(), x[None].expand(8, 8).contiguous()]]


def images(dtype: torch.dtype) -> list[list[Tensor]]:
    return [[x] for x in _spotted(dtype, 2, 2, 6, 6)]


def volumes(dtype: torch.dtype) -> list[list[Tensor]]:
    return [[x] for x in _spotted(dtype, 1, 2, 4, 4, 4)]


def signals(dtype: torch.dtype) -> list[list[Tensor]]:
    return [[x] for x in _spotted(dtype, 2, 3, 8)]


def _list(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _computed(x: Tensor) -> Tensor:
    """The same numbers, out of an operator whose results are sums of products of what it reads."""
    flat = x.reshape(-1, 1)
    return F.embedding(torch.arange(flat.shape[0]), flat).reshape(x.shape)


def _program(cases: Sequence[Case], computed: bool) -> Callable[..., Any]:
    """All of ``cases`` in one function: a loss that reaches each output by factors given, and the outputs."""

    def run(arguments: list[list[Tensor]], factors: list[list[Tensor]]) -> Any:
        loss: Any = 0
        results = []
        for case, given, weights in zip(cases, arguments, factors, strict=True):
            if computed:
                given = [_computed(x) if x.is_floating_point() else x for x in given]
                weights = [_computed(w) for w in weights]
            outputs = _list(case.function(*given))
            reached = [o for o in outputs if o.requires_grad]
            for o, w in zip(reached, weights, strict=True):
                loss = loss + (o * w).sum()
            results.append([o.detach() for o in outputs])
        return loss, results

    return run


def _factors(outputs: list[Tensor], special: bool) -> list[Tensor]:
    g = torch.Generator().manual_seed(7)
    result = []
    for o in outputs:
        if o.requires_grad:
            w = torch.rand(o.shape, generator=g, dtype=o.dtype) + 0.5
            if special and w.numel():
                w.view(-1)[::4] = nan
                w.view(-1)[1::6] = inf
            result.append(w)
    return result


def _leaves(given: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [x.detach().clone().requires_grad_(x.dtype == dtype) for x in given]


def _run(program: Any, data: Sequence[Sequence[Tensor]], factors: list[list[Tensor]], dtype: torch.dtype) -> Any:
    leaves = [_leaves(given, dtype) for given in data]
    loss, outputs = program(leaves, factors)
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    return outputs, [[x.grad for x in given] for given in leaves]


def differences(cases: Sequence[Case], dtype: torch.dtype, *, computed: bool = False) -> dict[str, list[str]]:
    """What differs from eager, in words, by the name of the case; the cases are compiled together.

    Args:
        cases: operators and their data.
        dtype: element type of the data.
        computed: let arguments and arriving gradients come out of another operator of the graph.
    """
    found: dict[str, list[str]] = {}
    all_data = [case.data(dtype) for case in cases]
    eager = _program(cases, computed)
    compiled = torch.compile(eager, backend="lightning_ort", options={"verify": False}, dynamic=False)
    for number in range(max(map(len, all_data))):
        data = [d[min(number, len(d) - 1)] for d in all_data]
        for with_special in (False, True):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with torch.enable_grad():
                    factors = [
                        _factors(_list(c.function(*_leaves(d, dtype))), with_special)
                        for c, d in zip(cases, data, strict=True)
                    ]
                expected = _run(eager, data, factors, dtype)
                got = _run(compiled, data, factors, dtype)
            for i, case in enumerate(cases):
                if number >= len(all_data[i]) or (with_special and not case.special):
                    continue
                for kind, mine, theirs in (("output", got[0], expected[0]), ("gradient", got[1], expected[1])):
                    for k, (a, b) in enumerate(zip(mine[i], theirs[i], strict=True)):
                        text = _difference(a, b, [*data[i], *factors[i]])
                        if text:
                            label = f"{kind} {k}" + (" of special gradients" if with_special else "")
                            found.setdefault(case.name, []).append(f"{label}, data {number}: {text}")
    return found


def _difference(got: Tensor | None, expected: Tensor | None, arguments: Sequence[Tensor]) -> str:
    if got is None or expected is None:
        return "" if got is expected or (got if got is not None else expected).eq(0).all() else "one has no gradient"
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return f"{got.dtype} {tuple(got.shape)}, eager {expected.dtype} {tuple(expected.shape)}"
    if not got.is_floating_point():
        wrong = got != expected
        kinds = {"values": wrong}
    else:
        rtol = RTOL.get(got.dtype, 1e-3)
        scale = expected[expected.isfinite()].abs()
        atol = rtol * min(1.0, float(scale.max()) if scale.numel() else 1.0) + torch.finfo(got.dtype).tiny * 4
        both = got.isfinite() & expected.isfinite()
        close = (got - expected).abs() <= rtol * expected.abs() + atol
        kinds = {
            "NaN hidden": expected.isnan() & ~got.isnan(),
            "NaN of its own": got.isnan() & ~expected.isnan(),
            "infinity": ~got.isnan() & ~expected.isnan() & ~both & (got != expected),
            "values": both & ~close,
        }
    parts = []
    for name, wrong in kinds.items():
        if wrong.any():
            place = tuple(int(i) for i in wrong.nonzero()[0]) if wrong.dim() else ()
            of = [a[place].item() for a in arguments if a.shape == got.shape]
            numbers = f"{got[place].item()}, eager {expected[place].item()}, of {of}"
            parts.append(f"{name} at {int(wrong.sum())} places, the first is {place}: {numbers}")
    return "; ".join(parts)
