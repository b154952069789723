"""The first run of a compiled graph against the same computation in torch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.conversions import ConversionsTo
from lightning_ort.compiler.surroundings import Surroundings, without_autocast
from lightning_ort.errors import MismatchError

__all__ = ["ForkedRNG", "Results", "compare", "difference", "evaluate", "largest"]

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
# An entry may be off by the tolerance times the largest entry of its own tensor plus this share of the largest entry
# of its group: a gradient that is zero but for rounding has no scale of its own.
_GROUP_SHARE = 1e-2
# How much farther than torch from the result in float64, as a multiple of torch's largest error.
_ROUNDING_FACTOR = 3
# Predicted classes and other integers may differ where two candidates tie but for rounding; in 16 bits, more do.
_TIES = 0.01
_ADVICE = (
    "Nothing was updated. Please report it with the model; ORTStrategy(verify=False) would skip this check, and "
    "Trainer(strategy='auto') trains in torch."
)


@dataclasses.dataclass
class Results:
    """What one execution of a region gives: outputs by number, gradients and changed inputs by input number."""

    outputs: dict[int, torch.Tensor]
    gradients: dict[int, torch.Tensor]
    updates: dict[int, torch.Tensor]


class ForkedRNG:
    """Start from the random state ``start`` (default: the present one) and restore the present state at the end."""

    def __init__(self, device: torch.device, start: Sequence[torch.Tensor] | None = None) -> None:
        self._device, self._start = device, start

    @staticmethod
    def state(device: torch.device) -> list[torch.Tensor]:
        """The random state that torch's draws on ``device`` (and the CPU) go on from."""
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        return states

    def restore(self, states: Sequence[torch.Tensor]) -> None:
        """Make ``states`` the present ones."""
        torch.set_rng_state(states[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self._device)

    def __enter__(self) -> None:
        self._present = self.state(self._device)
        if self._start is not None:
            self.restore(self._start)

    def __exit__(self, *exc: object) -> None:
        self.restore(self._present)


def evaluate(
    region: fx.GraphModule,
    args: Sequence[Any],
    incoming: Mapping[int, torch.Tensor | None],
    wanted: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    surroundings: Surroundings | None = None,
) -> Results:
    """Execute ``region`` in torch, without any effect on ``args``.

    Args:
        region: Dynamo's graph.
        args: its inputs.
        incoming: output number to incoming gradient; ``None`` stands for 1 (the loss).
        wanted: input numbers whose gradients are taken.
        dtype: compute in this type instead of the inputs' own floating-point types, and instead of those that the
            region converts to.
        surroundings: what ``region`` is computed under, by default the present ones. (Autocast leaves float64 alone.)
    """
    grad = bool(incoming) or torch.is_grad_enabled()
    # tensors made in inference mode have no version, by which changes in place are found
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        return _evaluate(region, args, incoming, wanted, dtype, surroundings or Surroundings.present())


def _evaluate(
    region: fx.GraphModule,
    args: Sequence[Any],
    incoming: Mapping[int, torch.Tensor | None],
    wanted: Sequence[int],
    dtype: torch.dtype | None,
    surroundings: Surroundings,
) -> Results:
    local: list[Any] = []
    for i, x in enumerate(args):
        if isinstance(x, torch.Tensor):
            x = x.detach()
            if dtype and x.is_floating_point():
                x = x.to(dtype)
            x = x.requires_grad_() if i in wanted else x.clone()
        local.append(x)
    before = [x._version if isinstance(x, torch.Tensor) else 0 for x in local]
    converted = contextlib.nullcontext() if dtype is None else ConversionsTo(dtype)
    with surroundings.applied(), converted:
        outputs = region(*local)
    gradients: dict[int, torch.Tensor] = {}
    if incoming:
        roots = [outputs[i] for i in incoming]
        seeds = [None if g is None else g.to(r.dtype) for g, r in zip(incoming.values(), roots, strict=True)]
        leaves = [local[i] for i in wanted]
        with without_autocast():
            found = torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
        gradients = {i: g.detach() for i, g in zip(wanted, found, strict=True) if g is not None}
    return Results(
        {i: o.detach() for i, o in enumerate(outputs) if isinstance(o, torch.Tensor)},
        gradients,
        {
            i: x.detach()
            for i, (x, version) in enumerate(zip(local, before, strict=True))
            if isinstance(x, torch.Tensor) and x._version != version
        },
    )


def compare(
    got: Results,
    wanted: Results,
    names: Mapping[str, Mapping[int, str]],
    precise: Callable[[], Results | None],
    half: Collection[torch.dtype] = (),
    advice: str = _ADVICE,
) -> None:
    """Raise unless ``got`` (ONNX Runtime) agrees with ``wanted`` (torch).

    Args:
        got: results to check; all that ``wanted`` has must be there.
        wanted: results of :func:`evaluate`.
        names: per kind (``outputs``, ``gradients``, ``updates``) the users' names of the numbers.
        precise: function without arguments that gives the results in float64, called only if something differs:
            where rounding alone makes torch as far from them as ONNX Runtime is, nothing is wrong. (In a deep network
            rounding decides which side of zero an activation is on, and so whole entries of gradients.)
        half: 16-bit types that values are rounded to on the way, whatever the type of the results.
        advice: what the error says that users can do.

    Raises:
        MismatchError: names the tensor and says by how much it is off.
    """
    exact: Results | None = None
    coarsest = max((_TOLERANCE[dtype] for dtype in half), default=0.0)
    ties = _TIES * (10 if half else 1)
    for kind in ("outputs", "gradients", "updates"):
        ours, theirs = getattr(got, kind), getattr(wanted, kind)
        rounding, least = None, 0.0
        scale = max((largest(t) for t in theirs.values() if t.is_floating_point()), default=0.0)
        for number, reference in theirs.items():
            name = names.get(kind, {}).get(number, f"{kind[:-1]} {number}")
            if number not in ours:
                if largest(reference) == 0:
                    continue
                raise MismatchError(f"ONNX Runtime gives no {name}; torch does. {advice}")
            tolerance = max(_TOLERANCE.get(reference.dtype, 0.0), coarsest)
            problem = difference(
                ours[number],
                reference,
                allowed=tolerance * (largest(reference) + _GROUP_SHARE * scale),
                wrong=max(1, int(ties * reference.numel())),
            )
            if problem is None:
                continue
            if exact is None:
                exact = precise()
            truths = getattr(exact, kind) if exact is not None else {}
            if number in truths and reference.is_floating_point():
                if rounding is None:
                    floats = {n: t for n, t in truths.items() if theirs[n].is_floating_point()}
                    # 16 bits leave noise where the truth is zero, as a share of which it would excuse anything
                    least = _GROUP_SHARE * max(_length(t) for t in floats.values()) if half else 0.0
                    rounding = max(_error(theirs[n], t, least) for n, t in floats.items())
                if _error(ours[number], truths[number], least) <= _ROUNDING_FACTOR * rounding:
                    continue
            raise MismatchError(f"{name} differs between ONNX Runtime and torch: {problem}. {advice}")


def largest(tensor: torch.Tensor) -> float:
    """Largest absolute value among the finite entries."""
    if not tensor.numel():
        return 0.0
    if tensor.dtype == torch.bool:
        return float(tensor.any())
    low, high = tensor.aminmax()
    largest = max(-float(low), float(high))
    if not math.isfinite(largest):
        largest = float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return largest


def _error(tensor: torch.Tensor, truth: torch.Tensor, least: float) -> float:
    """Distance from the truth as a share of its length (Euclidean norms), or of ``least`` if that is longer."""
    distance = _length(tensor.double() - truth.double())
    return distance / max(_length(truth), least, 1e-30) if math.isfinite(distance) else math.inf


def _length(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


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
