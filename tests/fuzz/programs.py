"""Random training steps, run through ``torch.compile(backend="lightning_ort")`` and in eager.

``python -m tests.fuzz.programs --seconds 600`` makes programs until the time is over and prints those that fail, cut
down to the statements that matter. Everything follows from a program's seed.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import logging
import math
import multiprocessing
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .making import make, runs
from .steps import Case, Program, State, cases, fresh_state, run

__all__ = ["Failure", "check", "explore", "shrink"]


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
        options: of the backend; by default two of eight seeds run on torch's own operators.
        calls: by default those of :func:`cases`.
    """
    torch._dynamo.reset()
    verify = program.seed % 2 == 0 if verify is None else verify
    function = program.function()
    placement = {3: "torch", 5: "torch-channels-last"}.get(program.seed % 8, "fastest")
    options = {"verify": verify, "placement": placement} | (options or {})
    compiled = torch.compile(function, backend="lightning_ort", options=options)
    state = fresh_state(program.dtype)
    calls = cases(program) if calls is None else calls
    for number, case in enumerate(calls):
        before = copy.deepcopy(state)
        theirs = run(program, function, state, case, number)
        ours = run(program, compiled, copy.deepcopy(before), case, number)
        where = f"call {number}, {case}, {options}"
        if isinstance(theirs, Exception):
            # without rows, what eager keeps for gradients is other than with rows: dropout is then its input itself
            no_matter = case.batch == 0 and re.search("in-?place operation", str(theirs))
            missed = not isinstance(ours, Exception) and not no_matter
            if missed and _raises(_without_unused(program), copy.deepcopy(before), case, number):
                return Failure("no error", f"{where}: eager raises {type(theirs).__name__}: {theirs}", program)
            state = before
            continue
        if isinstance(ours, Exception):
            if isinstance(run(program, torch.compile(function, backend="eager"), before, case, number), Exception):
                return None  # what Dynamo refuses, it refuses for any backend
            if _is_torchs_own(program, function, calls[: number + 1], ours):
                return None
            text = "".join(traceback.format_exception(ours)[-6:])
            return Failure(f"raises {type(ours).__name__}", f"{where}: {text[-3000:]}", program)
        # compared without the noise first, which costs a few more runs
        problem = _difference(program, theirs, ours, {})
        if problem is not None:
            noise = _noise(program, function, before, case, number, theirs)
            problem = _difference(program, theirs, ours, noise)
        if problem is not None and "set_grad_enabled" in program.source:
            # Dynamo makes x.T anew behind a graph break, with the gradients switched off by then
            dynamos = run(program, torch.compile(function, backend="eager"), copy.deepcopy(before), case, number)
            if isinstance(dynamos, Exception) or _difference(program, theirs, dynamos, noise) is not None:
                return None
        if problem is not None:
            return Failure("wrong", f"{where}: {problem}", program)
        if not all(b.isfinite().all() for b in state.buffers()):
            state = before
    return None


def _is_torchs_own(program: Program, function: Callable[..., Any], calls: Sequence[Case], error: Exception) -> bool:
    """Whether Dynamo fails to write the guards of the last call, as it does for torch's own tracing: some sizes have no
    source to name.
    """
    if "produce_guards" not in "".join(traceback.format_exception(error)):
        return False
    torch._dynamo.reset()
    compiled, state = torch.compile(function, backend="aot_eager"), fresh_state(program.dtype)
    results = [run(program, compiled, state, case, number) for number, case in enumerate(calls)]
    return type(results[-1]) is type(error) and not any(isinstance(r, Exception) for r in results[:-1])


def _raises(program: Program, state: State, case: Case, number: int) -> bool:
    return isinstance(run(program, program.function(), state, case, number), Exception)


def _without_unused(program: Program) -> Program:
    """The program without results that nothing reads: what an operator refuses there may go unnoticed."""
    statements = program.statements
    while True:
        kept = [s for s in statements if not _is_unused(s, statements, program.results)]
        if len(kept) == len(statements):
            return dataclasses.replace(program, statements=kept)
        statements = kept


def _is_unused(statement: str, statements: Sequence[str], results: Sequence[str]) -> bool:
    """Whether it defines or changes a tensor that is named nowhere but where it is defined and changed."""
    name = _written(statement) or statement.split(" = ")[0]
    about = [s for s in statements if _written(s) == name or s.startswith(f"{name} = ")]
    others = [s for s in statements if s not in about]
    return re.fullmatch(r"t\d+", name) is not None and not re.search(rf"\b{name}\b", "\n".join([*others, *results]))


def _written(statement: str) -> str | None:
    """The tensor that a statement changes in place."""
    found = re.match(r"(t\d+)(?:\.\w+_\(|\[.*\] .?= )", statement)
    return found[1] if found else None


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
    for factor in (0.0, 1.0, 1.7, 2.3, 3.1, 4.3):
        settings: dict[str, Any] = {"disturb": factor * eps} if factor else {"other_kernels": True}
        other = run(program, function, copy.deepcopy(before), case, number, **settings)
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
        if program.several and not program.apart and name.startswith("gradient"):
            # of the loss and of other results each by itself, then added: an infinity that the loss multiplies by 0 is
            # NaN then, whatever comes from the others
            got = torch.where(got.isnan() & wanted.isinf(), wanted, got)
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
        # what is small may be the difference of numbers that are not
        allowed = allowed + relative * max(size, 1e-2)
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
                if not runs(program):
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
        ours.send(None)
        process.join(10)
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
