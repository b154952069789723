"""Results beside torch's: how far they may be off, and what explains a difference.

All comparisons with torch use the functions of this file and its tolerances.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from lightning_ort.errors import MismatchError

__all__ = [
    "FILE",
    "STEP",
    "TRAINED_FILE",
    "UPDATE",
    "UPDATE_ROUNDING",
    "Doubts",
    "Mismatch",
    "Referee",
    "Results",
    "compare",
    "difference",
    "distance",
    "find_mismatch",
    "has_nan",
    "is_same_function",
    "largest",
    "varied",
]

# -- tolerances: shares of the largest entry of a tensor. Other types than these must be equal. ------------------------

STEP = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Outputs, gradients and statistics of a step. Closer than this, they are not looked at any further; what is farther
off must be explained by rounding, see :func:`find_mismatch`."""

UPDATE = {torch.float64: 1e-7, torch.float32: 1e-3}
"""The change of a weight, and a state of its optimizer, in one update; what is farther off must be about as near to the
update in float64 as torch is (:data:`UPDATE_ROUNDING` times as far)."""

FILE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2}
"""Outputs of an exported file; what is farther off is refused. Numbers of Python in a float64 module are of float32 in
the file, as torch's exporter writes them."""

TRAINED_FILE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 1e-3}
"""Outputs of the file that ORTTrainer exports beside those of its compiled step, both with rounding of their own: of
the largest entry, or of 1 if that is larger (a loss that has become small is the difference of large numbers)."""

UPDATE_ROUNDING = 3
_ROUNDING_FACTOR = 2
"""How much larger than the largest known effect of rounding a difference may be: in an update, and in a step."""

_GROUP_SHARE = 1e-2
"""An entry may be off by the tolerance times the largest entry of its own tensor plus this share of the largest entry
of its group: a gradient that is zero but for rounding has no scale of its own."""

_TIES = 0.01
"""Share of predicted classes and other integers that may differ without a look at their noise."""

_SAME_FUNCTION = {"rtol": 1e-4, "atol": 1e-5}
"""By how much an entry may be off between two graphs of one function, by itself and at least."""

_FIRST_SAMPLES, _SAMPLES = 4, 10
"""Evaluations with rounding noise: so many before the one in float64, and in all."""

_OTHER_VALUES, _CHANGE = 2, 0.01
"""How many other values a graph that differs is compared with, and by which share they are others."""


@dataclasses.dataclass
class Results:
    """What one execution of a region gives: outputs by number, gradients and changed inputs by input number."""

    outputs: dict[int, torch.Tensor]
    gradients: dict[int, torch.Tensor]
    updates: dict[int, torch.Tensor]


_KINDS = ("outputs", "gradients", "updates")


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """What differs, in words.

    Attributes:
        text: the words.
        certain: no rounding can be the reason (another shape, a missing result).
        spread: what is off are entries that are not finite, beside such of torch: infinities that meet the zeros of a
            product spread further than in torch's kernels.
    """

    text: str
    certain: bool
    spread: bool = False


class Referee(Protocol):
    """Computes in torch once more what was compared."""

    def evaluate(self, dtype: torch.dtype | None = None, noise: int | None = None) -> Results | None:
        """Results in ``dtype``, by default as at first; with rounding noise of the seed ``noise``, if one is given.

        ``None`` where the computation does not allow that.
        """


def compare(
    got: Results,
    wanted: Results,
    names: Mapping[str, Mapping[int, str]],
    referee: Referee,
    half: Collection[torch.dtype] = (),
    *,
    advice: str,
) -> None:
    """Raise unless ``got`` (ONNX Runtime) agrees with ``wanted`` (torch); see :func:`find_mismatch`.

    Args:
        advice: what the error says that users can do.

    Raises:
        MismatchError: names the tensor and says by how much it is off.
    """
    mismatch = find_mismatch(got, wanted, names, referee, half)
    if mismatch is not None:
        raise MismatchError(f"{mismatch.text}. {advice}")


def find_mismatch(
    got: Results,
    wanted: Results,
    names: Mapping[str, Mapping[int, str]],
    referee: Referee,
    half: Collection[torch.dtype] = (),
    *,
    exact: bool = False,
) -> Mismatch | None:
    """What in ``got`` (ONNX Runtime) is not as in ``wanted`` (torch), unless rounding explains it.

    Results that are close are compared with nothing else. For the others, torch computes again with noise wherever it
    rounds, and at last in float64: a difference is rounding if it is no larger than what that noise does to the same
    tensor, or if ONNX Runtime is about as near to float64 as torch is.

    Args:
        got: results to check; all that ``wanted`` has must be there.
        wanted: torch's.
        names: per kind (``outputs``, ``gradients``, ``updates``) the users' names of the numbers.
        referee: called only if something is not close.
        half: 16-bit types that values are rounded to on the way, whatever the type of the results.
        exact: nothing is rounded on the way, so that integers and truth values are the same or wrong.
    """
    coarsest = max((STEP[dtype] for dtype in half), default=0.0)
    suspects: list[_Suspect] = []
    spread = True
    for kind in _KINDS:
        ours, theirs = ({n: _real(t) for n, t in getattr(results, kind).items()} for results in (got, wanted))
        scale = max((largest(t) for t in theirs.values() if t.is_floating_point()), default=0.0)
        for number, reference in theirs.items():
            name = names.get(kind, {}).get(number, f"{kind[:-1]} {number}")
            if number not in ours:
                if largest(reference) == 0:
                    continue
                return Mismatch(f"ONNX Runtime gives no {name}; torch does", certain=True)
            tolerance = max(STEP.get(reference.dtype, 0.0), coarsest)
            allowed = tolerance * (largest(reference) + _GROUP_SHARE * scale)
            wrong = 0 if exact else _ties(reference)
            problem = difference(ours[number], reference, allowed=allowed, wrong=wrong)
            if problem is None:
                continue
            text = f"{name} differs between ONNX Runtime and torch: {problem}"
            if ours[number].shape != reference.shape or ours[number].dtype != reference.dtype:
                return Mismatch(text, certain=True)
            suspects.append(_Suspect(kind, number, text, ours[number], reference))
            beside = theirs.values() if kind == "gradients" else [reference]
            spread = spread and _only_spreads(ours[number], reference, beside, allowed)
    if suspects and spread:
        return Mismatch(suspects[0].text, certain=False, spread=True)
    for evidence in _evidence(referee) if suspects else ():
        for suspect in suspects:
            suspect.learn(evidence)
        suspects = [s for s in suspects if not s.is_explained()]
        if not suspects:
            return None
    return Mismatch(suspects[0].text, certain=False) if suspects else None


def _ties(reference: torch.Tensor) -> int:
    """How many entries may be others: two candidates that are equal may be told apart otherwise."""
    return int(_TIES * reference.numel()) if reference.numel() > 1 / _TIES else reference.numel() > 1


def _only_spreads(got: torch.Tensor, wanted: torch.Tensor, beside: Collection[torch.Tensor], allowed: float) -> bool:
    """Whether ``got`` is off only in entries that are not finite, as are some ``beside``, and hides none of torch's."""
    if not wanted.is_floating_point() or all(bool(torch.isfinite(t).all()) for t in beside):
        return False
    finite = torch.isfinite(got)
    near = _largest_difference(got[finite], wanted[finite])
    return near <= allowed + torch.finfo(wanted.dtype).tiny


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Real and imaginary parts, where there are such."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _evidence(referee: Referee) -> Iterator[tuple[Results, bool]]:
    """Results beside torch's first ones, and whether they are exact; the costliest in memory comes late."""
    for seed in range(_SAMPLES):
        if seed == _FIRST_SAMPLES:
            exact = referee.evaluate(torch.float64)
            if exact is not None:
                yield exact, True
            del exact
        sample = referee.evaluate(noise=seed)
        if sample is not None:
            yield sample, False
        del sample


class _Suspect:
    """A result that is not close to torch's, and what is known of its rounding."""

    def __init__(self, kind: str, number: int, text: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        self.kind, self.number, self.text = kind, number, text
        self._ours, self._theirs = ours, theirs
        self._off = [_distances(ours, theirs)]
        self._noise = [0.0] * len(self._off[0])

    def learn(self, evidence: tuple[Results, bool]) -> None:
        """Take ``(results, exact)`` into account."""
        results, exact = evidence
        other = getattr(results, self.kind).get(self.number)
        if other is not None:
            other = _real(other)
        if other is None or other.shape != self._theirs.shape:
            return
        noise = _distances(other, self._theirs)
        # it left the domain of a function: where torch has stayed, that excuses nobody, or NaN would train
        if math.inf not in noise:
            self._noise = [max(a, b) for a, b in zip(self._noise, noise, strict=True)]
        if exact and self._theirs.is_floating_point():
            self._off.append(_distances(self._ours, other))

    def is_explained(self) -> bool:
        """Whether rounding explains the difference."""
        return any(all(a <= _ROUNDING_FACTOR * b for a, b in zip(off, self._noise, strict=True)) for off in self._off)


def _distances(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """Distances between two tensors: a few large differences weigh most in the first, many small ones in the last.

    Floating-point entries must be finite in both, or be the same. Of other types the differing entries are counted,
    or, if there is but one (a count, say), subtracted.
    """
    if not b.is_floating_point():
        return [abs(float(a) - float(b)) if b.numel() == 1 else float((a != b).sum())]
    if a.dtype != b.dtype:
        a, b = a.double(), b.double()
    difference = a - b
    if not bool(torch.isfinite(difference).all()):
        same = (a == b) | (a.isnan() & b.isnan())
        difference = difference.masked_fill(same, 0.0)
        if not bool(torch.isfinite(difference).all()):
            return [math.inf] * 3
    wide = torch.promote_types(b.dtype, torch.float32)
    return [float(torch.linalg.vector_norm(difference, n, dtype=wide)) for n in (math.inf, 2, 1)]


class Doubts:
    """Tells errors of a graph from single decisions that rounding has turned.

    A difference that rounding does not explain is an error of the graph if it is there with other values too.
    Otherwise it may still be an accident: torch's results are to be taken, the next run is to be compared as well, and
    may not differ again. Nor can a graph be judged by infinities that spread: the first run without them tells.

    Args:
        advice: what errors say that users can do.
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._doubted: set[int] = set()

    def settle(
        self, graph: int, mismatch: Mismatch, again: Callable[[int], Mismatch | None], *, diverged: bool = False
    ) -> None:
        """Raise unless ``mismatch`` may be due to the values of one run alone.

        Args:
            graph: tells graphs apart.
            mismatch: what differed.
            again: compares a run with other values, of the seed that it gets; its RuntimeErrors and ValueErrors stand
                for values that torch itself refuses.
            diverged: values that are trained, or computed from such, are NaN: torch's own kernels disagree about
                gradients there, and will in the next run.

        Raises:
            MismatchError: it is no accident.
        """
        if mismatch.spread:
            return
        accident = not mismatch.certain and (diverged or graph not in self._doubted)
        if accident and not _recurs(again):
            if not diverged:
                self._doubted.add(graph)
            return
        raise MismatchError(f"{mismatch.text}. {self._advice}")


def _recurs(again: Callable[[int], Mismatch | None]) -> bool:
    """Whether a graph differs from torch with other values as well, wherever torch can compute with them."""
    found = []
    for seed in range(_OTHER_VALUES):
        try:
            found.append(again(seed) is not None)
        except (RuntimeError, ValueError):  # a value outside its range, which torch itself refuses
            continue
    return bool(found) and all(found)


def varied(args: Sequence[Any], chosen: Collection[int], seed: int) -> list[Any]:
    """``args`` with the tensors numbered ``chosen`` (by default all real ones) changed by up to one percent.

    NaN becomes a number between -1 and 1.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = chosen or [i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    other = list(args)
    for i in numbers:
        noise = torch.empty(args[i].shape, dtype=torch.float32).uniform_(-1, 1, generator=generator)
        noise = noise.to(args[i].device)
        with torch.inference_mode(False), torch.no_grad():
            changed = (args[i] * (1 + _CHANGE * noise)).to(args[i].dtype)
            other[i] = torch.where(changed.isnan(), noise.to(changed.dtype), changed)
    return other


def has_nan(args: Sequence[Any], chosen: Collection[int]) -> bool:
    """Whether one of the tensors numbered ``chosen`` among ``args`` has a NaN."""
    return any(bool(args[i].isnan().any()) for i in chosen)


def largest(tensor: torch.Tensor) -> float:
    """Largest absolute value among the finite entries."""
    if not tensor.numel():
        return 0.0
    if tensor.dtype == torch.bool:
        return float(tensor.any())
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):  # which torch does not order
        tensor = tensor.double()
    low, high = tensor.aminmax()
    largest = max(-float(low), float(high))
    if not math.isfinite(largest):
        largest = float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return largest


def difference(got: torch.Tensor, wanted: torch.Tensor, *, allowed: float, wrong: int = 0) -> str | None:
    """How two tensors disagree, in words, or ``None``.

    Args:
        got: the one to check.
        wanted: what it should be.
        allowed: by how much an entry may be off, if they are floating-point numbers.
        wrong: how many entries may be others, if they are not.
    """
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"shape {tuple(got.shape)} {got.dtype} instead of {tuple(wanted.shape)} {wanted.dtype}"
    if not wanted.numel():
        return None
    if not wanted.is_floating_point():
        others = int((got != wanted).sum())
        return f"{others} of {wanted.numel()} entries" if others > wrong else None
    allowed += torch.finfo(wanted.dtype).tiny
    off = _largest_difference(got, wanted)
    if off <= allowed:
        return None
    finite = torch.isfinite(wanted)
    if not torch.equal(torch.isfinite(got), finite):
        return f"{int((~torch.isfinite(got)).sum())} entries are not finite, in torch {int((~finite).sum())}"
    if not torch.equal(got.isnan(), wanted.isnan()):
        return "infinite in one, not a number in the other"
    off = _largest_difference(got[finite], wanted[finite])
    return f"largest difference {off:.3g}, largest entry {largest(wanted):.3g}" if off > allowed else None


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference; infinite when an entry is not a number."""
    if not a.numel():
        return 0.0
    low, high = (a - b).aminmax()
    off = max(-float(low), float(high))
    return off if math.isfinite(off) else math.inf


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference of entries of two real tensors, infinite if they differ where one is not finite."""
    return _distances(got, wanted)[0] if wanted.numel() else 0.0


def is_same_function(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two graphs of one function, which may sum in another order, can have given these."""
    return got.shape == wanted.shape and torch.allclose(got, wanted, **_SAME_FUNCTION, equal_nan=True)
