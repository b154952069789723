"""Random training steps, run through ``torch.compile(backend="lightning_ort")`` and in eager.

``python -m tests.fuzz.programs --seconds 600`` makes programs until the time is over and prints those that fail, cut
down to the statements that matter. Everything follows from a program's seed.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import linecache
import logging
import math
import multiprocessing
import os
import random
import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from .operations import BLOCKS, DIFFERENT, INPLACE, OPERATIONS, Operation

__all__ = ["Case", "Failure", "Program", "cases", "check", "fresh_state", "make", "run", "shrink"]

_ARGUMENTS = ("x", "y", "image", "labels", "step", "k")
_MOST_ENTRIES = 4000
"""in a tensor of a program: larger results are left out"""


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
        return f"def step(self, {', '.join(_ARGUMENTS)}):\n{lines}\n"

    def function(self) -> Callable[..., Sequence[torch.Tensor]]:
        """The step, in a form whose lines Dynamo can show."""
        name = f"<program {self.seed}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        namespace = {"torch": torch, "F": nn.functional}
        exec(compile(self.source, name, "exec"), namespace)
        return namespace["step"]  # type: ignore[return-value]


@dataclasses.dataclass
class Failure:
    """How a program went other than in eager."""

    kind: str
    detail: str
    program: Program

    def __str__(self) -> str:
        program = self.program
        where = (
            ", gradients at one after the other" if program.apart else ", gradients at all" if program.several else ""
        )
        return f"seed {program.seed}, {program.dtype}{where}: {self.kind}\n{self.detail}\n{program.source}"


# -- data ---------------------------------------------------------------------------------------------------------


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
    generator = torch.Generator().manual_seed(number)

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
        return x.to(dtype).requires_grad_()

    labels = torch.randint(4, (case.batch,), generator=generator)
    return [tensor(4), tensor(3, 4), tensor(2, 6, 6), labels, number, 0.5 + 0.25 * (number % 3)]


# -- making programs ------------------------------------------------------------------------------------------------


def make(seed: int, length: int | None = None) -> Program:
    """Make the program of a seed.

    Every statement is tried in eager with batches of two sizes, and left out where it raises.

    Args:
        seed: what everything follows from.
        length: number of statements; by default such that there are 10 to 60 calls, small numbers more often.
    """
    rng = random.Random(seed)
    maker = _Maker(rng)
    length = 6 + int(25 * rng.random() ** 4) if length is None else length
    for _ in range(8 * length):
        if len(maker.statements) >= length:
            break
        maker.add()
    program = Program(
        seed,
        rng.choice([torch.float64, torch.float64, torch.float32]),
        maker.statements,
        maker.finish(),
        several=rng.random() < 0.25,
        apart=rng.random() < 0.1,
    )
    while not _runs(program):
        # a write into what autograd needs, which only backward finds out
        inplace = [i for i, s in enumerate(program.statements) if i in maker.inplace and s != "pass"]
        if not inplace:
            return make(seed + 1_000_003, length)
        program.statements[inplace[-1]] = "pass"
    program.statements = [s for s in program.statements if s != "pass"]
    return program


def _runs(program: Program) -> bool:
    return all(
        not isinstance(run(program, program.function(), fresh_state(program.dtype), case, number), Exception)
        for number, case in enumerate([Case(6), Case(5)])
    )


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._worlds = []
        for batch in (6, 5):
            values = arguments(Case(batch), 0, torch.float64)
            world: dict[str, Any] = {"torch": torch, "F": nn.functional, "self": fresh_state(torch.float64)}
            world |= dict(zip(_ARGUMENTS, values, strict=True))
            self._worlds.append(world)
        self._names = ["x", "y", "x", "y"]
        self.statements: list[str] = []
        self.inplace: set[int] = set()

    def add(self) -> None:
        """Add a statement, if the one that is drawn works."""
        kind = self._rng.random()
        new = f"t{len(self.statements)}"
        if kind < 0.10:
            text, defines = self._block(new)
        elif kind < 0.18:
            text, defines = self._fill(self._rng.choice(INPLACE), owned=True), False
        else:
            operation = self._rng.choices(OPERATIONS, [o.weight for o in OPERATIONS])[0]
            expression = self._fill(operation)
            text, defines = expression and f"{new} = {expression}", True
        if not text or not self._works(text, new if defines else None):
            return
        if 0.10 <= kind < 0.18:
            self.inplace.add(len(self.statements))
        self.statements.append(text)
        if defines:
            self._names.append(new)

    def finish(self) -> list[str]:
        """Add the loss; returns names of results."""
        floats = [n for n in dict.fromkeys(self._names) if n.startswith("t")]
        recent = floats[-12:]
        chosen = self._rng.sample(recent, min(len(recent), 5))
        terms = [f"{n}.mean()" if self._rng.random() < 0.5 else f"({n} * 0.3).tanh().sum()" for n in chosen]
        self.statements.append(f"loss = {' + '.join([*terms, 'x.sum() * 0.01'])}")
        others = self._rng.sample(floats, min(len(floats), self._rng.randint(0, 3)))
        return ["loss", *others]

    def _block(self, new: str) -> tuple[str, bool]:
        block = self._rng.choice(BLOCKS)
        names = {"new": new, "a": self._pick((1, 3), 0), "a4": self._pick((2, 3), 4), "b4": self._pick((1, 3), 4)}
        if any(v is None and "{" + k + "}" in block for k, v in names.items()):
            return "", False
        text = block
        for key, value in names.items():
            text = text.replace("{" + key + "}", str(value))
        return text, "{new}" in block

    def _fill(self, operation: Operation, *, owned: bool = False) -> str:
        a = self._pick(operation.ndim, operation.last, owned=owned)
        if a is None:
            return ""
        shape = self._worlds[0][a].shape
        fitting = [n for n in dict.fromkeys(self._names) if self._fits(n, shape, operation.same)]
        values = {
            "a": a,
            "b": self._rng.choice(fitting),
            "f": str(self._rng.choice([0.25, 0.5, 0.75, 1.5, 2.0])),
            "d": str(self._rng.choice([0, -1]) if len(shape) < 3 else self._rng.choice([0, 1, -1])),
        }
        text = operation.text
        for key, value in values.items():
            text = text.replace("{" + key + "}", value)
        return text

    def _pick(self, ndim: tuple[int, int], last: int, *, owned: bool = False) -> str | None:
        def fits(name: str) -> bool:
            value = self._worlds[0][name]
            if owned and not name.startswith("t"):
                return False
            if not ndim[0] <= value.dim() <= ndim[1] or (ndim[0] < 0 and value.dim() != -ndim[0]):
                return False
            size = value.shape[-1] if value.dim() else 0
            return size == last if last > 0 else size >= -last

        # the newer, the likelier: programs are chains rather than lists
        names = [n for n in self._names if fits(n)]
        return self._rng.choices(names, [1 + i for i in range(len(names))])[0] if names else None

    def _fits(self, name: str, shape: torch.Size, same: bool) -> bool:
        other = self._worlds[0][name].shape
        if other == shape:
            return True
        if same or len(other) > len(shape):
            return False
        return all(o in (1, s) for o, s in zip(reversed(other), reversed(shape), strict=False))

    def _works(self, text: str, new: str | None) -> bool:
        if "return" in text:  # only in branches that are not taken
            return True
        for world in self._worlds:
            trial = text
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    exec(trial, world)
            except (RuntimeError, IndexError, ValueError, TypeError):
                return False
            if new is not None:
                value = world.get(new)
                if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                    return False
                if value.numel() > _MOST_ENTRIES or not value.detach().isfinite().all():
                    return False
                if value.detach().abs().sum() > 1e6:
                    return False
        return True


# -- running programs -----------------------------------------------------------------------------------------------


def fresh_state(dtype: torch.dtype) -> State:
    """The state that every program starts from."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(7)
        return State(dtype)


def run(
    program: Program, function: Callable[..., Any], state: State, case: Case, number: int, disturb: float = 0.0
) -> dict[str, torch.Tensor] | Exception:
    """Results, gradients, buffers and random state after one call, by name; or what it raised.

    Args:
        program: what is run.
        function: its step, compiled or not.
        state: what the step reads and writes; is changed.
        case: size and kind of the data.
        number: of the call.
        disturb: relative size of a random disturbance of all data and of the state.
    """
    values = arguments(case, number, program.dtype)
    if disturb:
        generator = torch.Generator().manual_seed(int(disturb * 1e18) % 2**31)
        with torch.no_grad():
            for t in [*values[:3], *state.parameters(), *state.buffers()]:
                if t.is_floating_point():
                    t.mul_(1 + disturb * torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype))
    state.zero_grad()
    torch.manual_seed(number)
    try:
        with warnings.catch_warnings():
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
    leaves = [*zip(_ARGUMENTS, values[:3], strict=False), *state.named_parameters()]
    found |= {f"gradient of {n}": t.grad.clone() for n, t in leaves if t.grad is not None}
    found |= {n: b.clone() for n, b in state.named_buffers()}
    return found | {"random state": torch.get_rng_state()}


def check(
    program: Program,
    *,
    verify: bool | None = None,
    options: dict[str, Any] | None = None,
    calls: Sequence[Case] | None = None,
) -> Failure | None:
    """Run a program in ONNX Runtime and in eager.

    Args:
        program: what is run.
        verify: check first runs against torch, as users have it; by default for every second seed, because a check
            that raises or steps in would hide what it found.
        options: of the backend; by default every eighth seed runs on torch's own operators.
        calls: by default those of :func:`cases`.
    """
    torch._dynamo.reset()
    verify = program.seed % 2 == 0 if verify is None else verify
    function = program.function()
    placement = "torch" if program.seed % 8 == 3 else "fastest"
    options = {"verify": verify, "placement": placement} | (options or {})
    compiled = torch.compile(function, backend="lightning_ort", options=options)
    state = fresh_state(program.dtype)
    for number, case in enumerate(cases(program) if calls is None else calls):
        before = copy.deepcopy(state)
        theirs = run(program, function, state, case, number)
        ours = run(program, compiled, copy.deepcopy(before), case, number)
        where = f"call {number}, {case}, {options}"
        if isinstance(theirs, Exception):
            if not isinstance(ours, Exception) and _raises(
                _without_unused(program), copy.deepcopy(before), case, number
            ):
                return Failure("no error", f"{where}: eager raises {type(theirs).__name__}: {theirs}", program)
            state = before
            continue
        if isinstance(ours, Exception):
            text = "".join(traceback.format_exception(ours)[-6:])
            return Failure(f"raises {type(ours).__name__}", f"{where}: {text[-3000:]}", program)
        # compared without the noise first, which costs a few more runs
        problem = _difference(program, theirs, ours, {})
        if problem is not None:
            problem = _difference(program, theirs, ours, _noise(program, function, before, case, number, theirs))
        if problem is not None:
            return Failure("wrong", f"{where}: {problem}", program)
        if not all(b.isfinite().all() for b in state.buffers()):
            state = before
    return None


def _raises(program: Program, state: State, case: Case, number: int) -> bool:
    return isinstance(run(program, program.function(), state, case, number), Exception)


def _without_unused(program: Program) -> Program:
    """The program without results that nothing reads: what an operator refuses there may go unnoticed."""
    statements = program.statements
    while True:
        used = Counter(re.findall(r"\bt\d+\b", "\n".join([*statements, *program.results])))
        # it defines a tensor, and that is where its name is, alone
        kept = [s for s in statements if not ((name := s.split(" = ")[0]) in used and used[name] == 1)]
        if len(kept) == len(statements):
            return dataclasses.replace(program, statements=kept)
        statements = kept


def _noise(
    program: Program,
    function: Callable[..., Any],
    before: State,
    case: Case,
    number: int,
    theirs: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor | None]:
    """What rounding does to each result: the largest change by disturbances of the last digit; ``None``: anything."""
    noise: dict[str, torch.Tensor | None] = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in theirs.items()}
    eps = torch.finfo(program.dtype).eps
    for factor in (1.0, 1.7, 2.3, 3.1, 4.3):
        other = run(program, function, copy.deepcopy(before), case, number, disturb=factor * eps)
        for name, largest in noise.items():
            if isinstance(other, Exception) or name not in other or other[name].shape != theirs[name].shape:
                noise[name] = None
            elif largest is not None:
                change = (other[name].double() - theirs[name].double()).abs()
                change[other[name].isfinite() != theirs[name].isfinite()] = math.inf
                noise[name] = torch.maximum(largest, change.nan_to_num(0.0, math.inf))
    return noise


def _difference(
    program: Program,
    theirs: dict[str, torch.Tensor],
    ours: dict[str, torch.Tensor],
    noise: dict[str, torch.Tensor | None],
) -> str | None:
    if theirs.keys() != ours.keys():
        return f"only in one: {sorted(theirs.keys() ^ ours.keys())}"
    relative = 1e-10 if program.dtype == torch.float64 else 1e-4
    for name, wanted in theirs.items():
        got = ours[name]
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            return f"{name}: {tuple(got.shape)} {got.dtype} instead of {tuple(wanted.shape)} {wanted.dtype}"
        if not wanted.is_floating_point():
            if not torch.equal(got, wanted):
                return f"{name}: other numbers"
            continue
        largest = noise.get(name, torch.zeros(()))
        if largest is None or not wanted.numel():
            continue
        finite = wanted.isfinite()
        size = float(wanted[finite].abs().max()) if finite.any() else 0.0
        allowed = 100 * largest + 100 * float(largest[largest.isfinite()].max() if largest.numel() else 0) * 0.1
        allowed = allowed + relative * max(size, 1e-3)
        wrong = (got.double() - wanted.double()).abs() > allowed
        wrong |= got.isnan() != wanted.isnan()
        wrong |= got.isinf() != wanted.isinf()
        wrong |= got.isinf() & wanted.isinf() & (got != wanted)
        wrong &= ~(largest.isinf() | torch.zeros_like(wrong))
        if wrong.any():
            at = int(wrong.reshape(-1).nonzero()[0])
            return (
                f"{name}: {int(wrong.sum())} of {wanted.numel()} entries, the first {float(got.reshape(-1)[at])!r} "
                f"instead of {float(wanted.reshape(-1)[at])!r}; largest {size:.3g}"
            )
    return None


def shrink(failure: Failure, seconds: float = 120.0) -> Failure:
    """Leave out statements that the failure does not need."""
    until = time.monotonic() + seconds
    best, step = failure, max(1, len(failure.program.statements) // 2)
    verify = "'verify': True" in failure.detail
    calls = cases(failure.program)
    while step and time.monotonic() < until:
        start, removed = len(best.program.statements) - step, False
        while start > -step and time.monotonic() < until:
            kept = best.program.statements[: max(start, 0)] + best.program.statements[max(start, 0) + step :]
            for results in ([*best.program.results[:1]], best.program.results):
                program = dataclasses.replace(best.program, statements=kept, results=results)
                program = _with_loss(program)
                if not _runs(program):
                    continue
                again = check(program, verify=verify, calls=calls)
                if again is not None and again.kind == failure.kind:
                    best, removed = again, True
                    break
            start -= step
        step = step // 2 if not removed or step > 1 else 0 if not removed else step
    return best


def _with_loss(program: Program) -> Program:
    """The program with a loss made of what is left of the tensors it was made of."""
    defined = {s.split(" = ")[0] for s in program.statements} | {"x", "y"}
    statements = []
    for s in program.statements:
        if s.startswith("loss = "):
            terms = [
                t for t in s.removeprefix("loss = ").split(" + ") if t.strip("(").split(".")[0].split(" ")[0] in defined
            ]
            s = f"loss = {' + '.join(terms or ['x.sum()'])}"
        statements.append(s)
    if not any(s.startswith("loss = ") for s in statements):
        statements.append("loss = x.sum()")
    results = [r for r in program.results if r == "loss" or r in defined]
    return dataclasses.replace(program, statements=statements, results=results)


# -- many programs --------------------------------------------------------------------------------------------------


def _worker(connection: Any, cut: bool) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    os.environ.setdefault("LIGHTNING_ORT_MEASURE", "0")  # what runs where shall follow from the seed
    while (seed := connection.recv()) is not None:
        failure = check(make(seed))
        if failure is not None and cut:
            failure = shrink(failure)
        connection.send(None if failure is None else str(failure))


def explore(seeds: Iterator[int], seconds: float, *, patience: float = 300.0, cut: bool = True) -> Iterator[str | None]:
    """Check programs in a process of their own, which may hang or die; yield what failed, or ``None``."""
    context = multiprocessing.get_context("spawn")
    until = time.monotonic() + seconds
    process = None
    for seed in seeds:
        if time.monotonic() > until:
            break
        if process is None:
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(theirs, cut), daemon=True)
            process.start()
            theirs.close()
        ours.send(seed)
        try:
            if ours.poll(patience):
                yield ours.recv()
                continue
            yield f"seed {seed}: hangs\n{make(seed).source}"
        except EOFError:
            yield f"seed {seed}: the process died with {process.exitcode}\n{make(seed).source}"
        process.kill()
        process = None
    if process is not None:
        process.kill()


def main() -> None:
    """Make programs for a time, and exit with 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--first", type=int, default=1_000, help="first seed")
    parser.add_argument("--stride", type=int, default=1, help="distance of seeds, for several runs side by side")
    parser.add_argument("--count", type=int, default=10**9, help="most programs")
    parser.add_argument("--whole", action="store_true", help="print programs that fail as they are")
    options = parser.parse_args()
    failed = done = 0
    seeds = range(options.first, options.first + options.count * options.stride, options.stride)
    start = time.monotonic()
    for done, failure in enumerate(explore(iter(seeds), options.seconds, cut=not options.whole), 1):
        if failure is not None:
            failed += 1
            print(failure, flush=True)
        if done % 50 == 0:
            print(f"# {done} programs, {failed} failed, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{done} programs, {failed} failed, {time.monotonic() - start:.0f} s")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
