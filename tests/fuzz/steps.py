"""Random training steps: what one is, what it is called with, and what a call leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .operations import DIFFERENT

__all__ = ["ARGUMENTS", "NAMES", "Case", "Program", "State", "arguments", "cases", "fresh_state", "run"]

ARGUMENTS = ("x", "y", "image", "labels", "step", "k")


class State(nn.Module):
    """What the programs read and write: parameters, buffers and two layers."""

    mean: torch.Tensor
    scale: torch.Tensor
    queue: torch.Tensor
    count: torch.Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4) * 0.5)
        self.v = nn.Parameter(torch.randn(4))
        self.kernel = nn.Parameter(torch.randn(2, 2, 3, 3) * 0.3)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("queue", torch.randn(4, 3))
        self.register_buffer("count", torch.zeros(()))
        self.to(dtype)


class Reversed(torch.autograd.Function):
    """A view, whose gradient is not that of a view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * -0.5


class Cubed(torch.autograd.Function):
    """Reads its argument, and its result, when gradients are computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x**3
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, y = ctx.saved_tensors
        return grad * (3 * x**2 + 0.1 * y)


NAMES = {"torch": torch, "F": nn.functional, "Reversed": Reversed, "Cubed": Cubed}
"""what programs may name"""


@dataclasses.dataclass
class Program:
    """A step as source text.

    Attributes:
        seed: what it was made from.
        dtype: of parameters and data.
        statements: the body of the step.
        results: names of the tensors it returns; the first is the loss.
        several: gradients arrive at the sum of all results that require one, not only at the loss.
        apart: they arrive at one result after the other, in a ``backward`` for each, which keeps the graph or does not.
    """

    seed: int
    dtype: torch.dtype
    statements: list[str]
    results: list[str]
    several: bool = False
    apart: bool = False

    @property
    def source(self) -> str:
        """The step as a function ``step(self, x, y, image, labels, step, k)``."""
        body = "\n".join([*self.statements, f"return {', '.join(self.results)},"])
        lines = "\n".join(f"    {line}" for line in body.splitlines())
        return f"def step(self, {', '.join(ARGUMENTS)}):\n{lines}\n"

    def function(self) -> Callable[..., Sequence[torch.Tensor]]:
        """The step, in a form whose lines Dynamo can show."""
        name = f"<program {self.seed}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        namespace = dict(NAMES)
        exec(compile(self.source, name, "exec"), namespace)
        return namespace["step"]  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of a step: size of its batch and what its data are like."""

    batch: int
    data: str = "normal"


_CALLS = [
    (8, [Case(6), Case(6, "special")]),
    (5, [Case(6), Case(5), Case(4, "special")]),
    (2, [Case(1), Case(1, "special")]),
    (2, [Case(0)]),
    (1, [Case(5), Case(1)]),
    (1, [Case(5), Case(0), Case(4)]),
    (1, [Case(6), Case(6), Case(5), Case(6, "special"), Case(1), Case(0)]),
]
"""How often which calls are made: each size that is new costs a compilation, most of the time of a program."""


def cases(program: Program) -> list[Case]:
    """The calls that a program is checked with, in order."""
    text = "\n".join(program.statements)
    without = {kind for operation, kinds in DIFFERENT.items() if operation in text for kind in kinds}
    rng = random.Random(program.seed)
    (calls,) = rng.choices([calls for _, calls in _CALLS], [weight for weight, _ in _CALLS])
    special = rng.choice([kind for kind in ("zeros", "ties", "large", "nan", "inf") if kind not in without])
    calls = [dataclasses.replace(c, data=special) if c.data == "special" else c for c in calls]
    return [c for c in calls if c.batch or "empty" not in without] or [Case(6)]


def arguments(case: Case, number: int, dtype: torch.dtype) -> list[Any]:
    """Arguments of the ``number``-th call."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(number)

    def tensor(*shape: int) -> torch.Tensor:
        x = torch.randn(case.batch, *shape, generator=generator, dtype=torch.float64)
        if case.data == "zeros":
            x = x * (torch.rand(x.shape, generator=generator) > 0.7)
        elif case.data == "ties":
            x = (x * 2).round() / 2
        elif case.data in ("nan", "inf") and x.numel():
            x.view(-1)[int(torch.randint(x.numel(), (), generator=generator))] = float(case.data)
        elif case.data == "large":
            x = x * 100
        # each second call, it begins somewhere in its memory, as the rows of a table do
        memory = torch.zeros(case.batch + 2 * (number % 2), *shape, dtype=dtype)
        return memory[number % 2 : number % 2 + case.batch].copy_(x).requires_grad_()

    labels = torch.randint(4, (case.batch,), generator=generator)
    return [tensor(4), tensor(3, 4), tensor(2, 6, 6), labels, number, 0.5 + 0.25 * (number % 3)]


def fresh_state(dtype: torch.dtype) -> State:
    """The state that every program starts from."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(7)
        return State(dtype)


_APPROXIMATED = frozenset([
    "acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "exp", "exp2", "expm1", "gelu", "lgamma", "log", "log10",
    "log1p", "log2", "log_sigmoid_forward", "mish", "pow", "rsqrt", "sigmoid", "silu", "sin", "sinh", "softplus",
    "sqrt", "tan", "tanh",
])  # fmt: skip
"""Functions whose last digit is up to who computes them."""


_ROUNDED = frozenset([
    "_fused_rms_norm", "addcdiv", "addcmul", "addmm", "bmm", "div", "dot", "linalg_vector_norm", "mean", "mm", "mul",
    "mv", "native_batch_norm", "native_group_norm", "native_layer_norm", "std", "sum", "var",
])  # fmt: skip
"""Functions whose formula others may write in another order; integers come out exactly all the same."""


class _Approximated(TorchDispatchMode):
    """While entered, functions that are computed by approximation are off by a relative error of about ``size``."""

    def __init__(self, size: float, generator: torch.Generator) -> None:
        super().__init__()
        self._size, self._generator = size, generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name not in _APPROXIMATED | _ROUNDED:
            return result
        first, *others = result if isinstance(result, tuple) else (result,)
        if first.is_floating_point():
            noise = torch.randn(first.shape, generator=self._generator, dtype=torch.float64)
            rounded = first * (1 + self._size * noise).to(first.dtype)
            first = torch.where(first == first.round(), first, rounded) if name in _ROUNDED else rounded
        return (first, *others) if isinstance(result, tuple) else first


_SUMMING = ("aten::sum", "aten::mean", "aten::nll_loss_forward", "aten::nll_loss2d_forward")


class _OtherKernels(TorchDispatchMode):
    """While entered, the smallest numbers are zeros, and sums that are zero have the other sign: kernels differ."""

    def __enter__(self) -> Any:
        torch.set_flush_denormal(True)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> Any:
        torch.set_flush_denormal(False)
        return super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first, *others = result if isinstance(result, tuple) else (result,)
        if func._schema.name in _SUMMING and first.is_floating_point():
            first = torch.where(first == 0, -first, first)
            return (first, *others) if isinstance(result, tuple) else first
        return result


def run(
    program: Program,
    function: Callable[..., Any],
    state: State,
    case: Case,
    number: int,
    disturb: float = 0.0,
    *,
    other_kernels: bool = False,
) -> dict[str, torch.Tensor] | Exception:
    """Results, gradients, buffers and random state after one call, by name; or what it raised.

    Args:
        program: what is run.
        function: its step, compiled or not.
        state: what the step reads and writes; is changed.
        case: size and kind of the data.
        number: of the call.
        disturb: relative size of a random disturbance of all data and of the state, and of what is approximated.
        other_kernels: differ where kernels may do so at will.
    """
    values = arguments(case, number, program.dtype)
    noise: contextlib.AbstractContextManager[object] = _OtherKernels() if other_kernels else contextlib.nullcontext()
    if disturb:
        generator = torch.Generator(torch.get_default_device()).manual_seed(int(disturb * 1e18) % 2**31)
        noise = _Approximated(disturb, generator)
        with torch.no_grad():
            for t in [*values[:3], *state.parameters(), *state.buffers()]:
                if t.is_floating_point():
                    t.mul_(1 + disturb * torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype))
    state.zero_grad()
    torch.manual_seed(number)
    try:
        with warnings.catch_warnings(), noise, torch.enable_grad():  # whatever a call that failed has left
            warnings.simplefilter("ignore")
            results = function(state, *values)
            total = results[0]
            if program.apart:
                for extra in results[1:]:
                    if extra.requires_grad:
                        (extra.sum() * 0.3).backward(retain_graph=program.seed % 3 > 0)
            elif program.several:
                for extra in results[1:]:
                    if extra.requires_grad:
                        total = total + extra.sum() * 0.3
            if total.requires_grad:
                total.backward()
    except Exception as error:
        return error
    found = {f"result {n}": r.detach().clone() for n, r in zip(program.results, results, strict=False)}
    leaves = [*zip(ARGUMENTS, values[:3], strict=False), *state.named_parameters()]
    found |= {f"gradient of {n}": t.grad.clone() for n, t in leaves if t.grad is not None}
    found |= {n: b.clone() for n, b in state.named_buffers()}
    return found | {"random state": torch.get_rng_state()}
