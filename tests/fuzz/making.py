"""Makes random training steps, each from a seed."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch

from .operations import BLOCKS, INPLACE, OPERATIONS, Operation
from .steps import ARGUMENTS, NAMES, Case, Program, arguments, fresh_state, run

__all__ = ["make", "runs"]

_MOST_ENTRIES = 4000
"""in a tensor of a program: larger results are left out"""


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
    while not runs(program):
        # a write into what autograd needs, which only backward finds out
        inplace = [i for i, s in enumerate(program.statements) if i in maker.inplace and s != "pass"]
        if not inplace:
            return make(seed + 1_000_003, length)
        program.statements[inplace[-1]] = "pass"
    program.statements = [s for s in program.statements if s != "pass"]
    return program


def runs(program: Program) -> bool:
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
            world: dict[str, Any] = NAMES | {"self": fresh_state(torch.float64)}
            world |= dict(zip(ARGUMENTS, values, strict=True))
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
        # autograd takes no notice of these writes: eager's gradients of what has read the weights before are wrong
        written = [w for w in ("self.w", "self.v") if f"{w}.data" in block or "_foreach" in block]
        if any(w in statement for w in written for statement in self.statements):
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
