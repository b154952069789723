"""Torch's own samples of its operators, compiled beside eager: results, gradients, element types, random numbers.

``python -m tests.fuzz.operators`` goes through the operators of ``torch.testing`` in one element type and prints the
samples that go otherwise. Names of operators, or beginnings of names, may follow. ``--autocast bfloat16`` runs them
under that; ``--layouts`` transposes their inputs in memory and puts a dropout behind the results, whose numbers eager
draws in the order in which those lie.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.testing._internal.common_methods_invocations import op_db  # torch's list has no public name
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from lightning_ort.verification import largest

__all__ = ["check", "operators", "samples"]

# Their results are what memory happens to hold, or depend on more than the samples say.
_UNDEFINED = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_", "resize_as_",
}  # fmt: skip
_RELATIVE = {
    torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2,
    torch.complex128: 1e-9, torch.complex64: 2e-5, torch.complex32: 4e-3,
}  # fmt: skip
"""By how much an entry may be off, as a share of the largest of its tensor, or"""
_GROUP_SHARE = 0.05
"""of this share of the largest of all results."""
# With inputs that lie otherwise: of these the results do too, and eager's gradient of hardsigmoid has a float32 factor.
_OTHER_STRIDES = {
    "_native_batch_norm_legit", "_batch_norm_with_update", "nn.functional.max_unpool1d", "select_scatter",
    "nn.functional.hardsigmoid",
}  # fmt: skip
_EXACT = dict.fromkeys(_RELATIVE, 0.0)


def operators(dtype: torch.dtype, names: Sequence[str] = (), device: str = "cpu") -> list[OpInfo]:
    """Those that have samples of ``dtype`` and a name that begins with one of ``names``, if there are any."""
    found = [op for op in op_db if op.supports_dtype(dtype, device) and op.name not in _UNDEFINED]
    return [op for op in found if not names or op.name.startswith(tuple(names))]


def samples(op: OpInfo, dtype: torch.dtype, count: int, device: str = "cpu") -> list[SampleInput]:
    """Up to ``count`` samples, from all of the list."""
    torch.manual_seed(0)
    gradients = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    drawn = list(itertools.islice(op.sample_inputs(device, dtype, requires_grad=gradients), 200))
    return drawn[:: max(len(drawn) // count, 1)][:count]


def check(
    op: OpInfo,
    sample: SampleInput,
    *,
    verify: bool = False,
    autocast: torch.dtype | None = None,
    layouts: bool = False,
) -> str | None:
    """What goes otherwise than in eager, in words; ``None`` if nothing does, or if eager refuses the sample.

    Under ``autocast``, what eager leaves as it is has to be as exact as without. With ``layouts``, inputs lie otherwise
    in memory, and results go through a dropout.
    """
    bounds = _RELATIVE

    def function(tensors: list[torch.Tensor]) -> Any:
        values = iter(tensors)
        x, args, kwargs = pytree.tree_map(lambda v: next(values) if isinstance(v, torch.Tensor) else v, given)
        if op.name.endswith("_"):  # which changes its input, and that may be a leaf
            x = pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, x)
        result = op.op(x, *args, **kwargs)
        return pytree.tree_map(_dropped, result) if layouts else result

    given = (sample.input, sample.args, sample.kwargs)
    leaves = [v for v in pytree.tree_leaves(given) if isinstance(v, torch.Tensor)]
    if layouts:
        leaves = [_transposed(v) for v in leaves]
    if autocast is not None and not all(v.numel() for v in leaves):
        return None  # the way to an empty result is another one, on which something may be cast
    try:
        wanted = _run(function, leaves, autocast)
        again = _run(function, leaves, autocast)
        if autocast is not None and _difference(wanted, _run(function, leaves), _EXACT) is not None:
            bounds = {**_RELATIVE, torch.float32: _RELATIVE[autocast]}
    except Exception:
        return None
    if _difference(again, wanted, bounds) is not None:
        return None  # it does not repeat itself
    torch._dynamo.reset()
    placement = {"placement": "onnxruntime"} if layouts else {}
    compiled = torch.compile(function, backend="lightning_ort", options={"verify": verify, **placement})
    try:
        for _ in range(2):  # checked, and not
            found = _run(compiled, leaves, autocast)
            problem = _difference(found, wanted, bounds)
            if problem is not None and not (autocast is None and _is_nearer(found, wanted, function, leaves)):
                return problem
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()[:300]}"
    return None


def _is_nearer(
    found: Sequence[Any], wanted: Sequence[Any], function: Callable[[list[torch.Tensor]], Any], leaves: Sequence[Any]
) -> bool:
    """Whether all that differs is nearer to what float64 gives than eager's rounding of float32 is."""
    if not any(x.dtype == torch.float32 for x in leaves):
        return False
    exact = _run(function, [x.double() if x.dtype == torch.float32 else x for x in leaves])
    rows = list(zip(found, wanted, exact, strict=True))
    if not all(isinstance(x, torch.Tensor) and x.layout == torch.strided for row in rows for x in row):
        return False
    if any((f.dtype, f.shape) != (w.dtype, w.shape) for f, w, _ in rows):
        return False
    sums = [[(_real(x).double() - _real(e).double()).abs().sum() for x in (f, w)] for f, w, e in rows]
    return all(ours <= eagers for ours, eagers in sums if not torch.equal(ours, eagers))


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in another order in memory, images with their channels last."""
    if tensor.layout != torch.strided or tensor.dim() < 2:
        return tensor
    rank = tensor.dim()
    places = [0, *range(2, rank), 1] if rank > 3 else [*range(rank - 2), rank - 1, rank - 2]
    back = [places.index(d) for d in range(rank)]
    return tensor.detach().permute(places).contiguous().permute(back).requires_grad_(tensor.requires_grad)


def _dropped(value: Any) -> Any:
    is_real = isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout == torch.strided
    return torch.nn.functional.dropout(value, 0.5) if is_real else value


def _run(
    function: Callable[[list[torch.Tensor]], Any], leaves: Sequence[torch.Tensor], autocast: torch.dtype | None = None
) -> list[Any]:
    """Results, gradients and the next random numbers."""
    device = next((x.device.type for x in leaves), "cpu")
    cast = contextlib.nullcontext() if autocast is None else torch.autocast(device, autocast, cache_enabled=False)
    inputs = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad) for x in leaves]
    torch.manual_seed(1)
    with cast:
        results = pytree.tree_leaves(function(inputs))
    drawn = torch.stack([torch.rand((), device=device).cpu() for device in ("cpu", *{x.device for x in leaves})])
    roots = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    gradients: Sequence[Any] = []
    if roots and wanted:
        generator = torch.Generator().manual_seed(2)
        seeds = [(torch.rand(r.shape, generator=generator, dtype=torch.float64) + 0.5).to(r) for r in roots]
        gradients = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
    plain = [r.detach() if isinstance(r, torch.Tensor) else r for r in results]
    return [*plain, *gradients, drawn]


def _difference(got: Sequence[Any], wanted: Sequence[Any], bounds: Mapping[Any, float]) -> str | None:
    if len(got) != len(wanted):
        return f"{len(got)} results instead of {len(wanted)}"
    # a sum that is zero but for rounding has no scale of its own
    dense = [_real(t) for t in wanted if isinstance(t, torch.Tensor) and t.layout == torch.strided]
    scale = max((largest(t) for t in dense if t.is_floating_point()), default=0.0)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        problem = _off(a, b, _GROUP_SHARE * scale, bounds)
        if problem is not None:
            return f"result {i} of {len(wanted)}: {problem}"
    return None


def _off(got: Any, wanted: Any, scale: float, bounds: Mapping[Any, float]) -> str | None:
    if not isinstance(got, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return None if got == wanted or (got != got and wanted != wanted) else f"{got!r} instead of {wanted!r}"
    if got.shape != wanted.shape or got.dtype != wanted.dtype or got.layout != wanted.layout:
        return f"{got.dtype} {tuple(got.shape)} instead of {wanted.dtype} {tuple(wanted.shape)}"
    if got.layout != torch.strided:
        got, wanted = got.to_dense(), wanted.to_dense()
    relative = bounds.get(wanted.dtype)
    got, wanted = _real(got), _real(wanted)
    if relative is None:
        return None if torch.equal(got, wanted) else f"{got.flatten()[:6].tolist()} for {wanted.flatten()[:6].tolist()}"
    got, wanted = got.double(), wanted.double()
    finite = wanted.isfinite()
    others = [x.masked_fill(finite, 0.0).nan_to_num(7e300) for x in (got, wanted)]
    if not torch.equal(*others):
        return "other entries are not finite"
    off = largest((got - wanted)[finite])
    if off > relative * max(largest(wanted), scale, 1e-30):
        return f"off by {off:.3g}, largest entry {largest(wanted):.3g}"
    return None


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Real and imaginary parts, where there are such."""
    return torch.view_as_real(tensor.to(torch.complex128).resolve_conj()) if tensor.is_complex() else tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--dtype", nargs="+", default=["float32"], help="one after the other")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=3, help="of each operator")
    parser.add_argument("--every", type=int, default=1, help="leave others of the operators out")
    parser.add_argument(
        "--first", type=int, default=0, help="operators to leave out before, for several runs side by side"
    )
    parser.add_argument("--autocast", choices=["bfloat16", "float16"])
    parser.add_argument("--layouts", action="store_true", help="inputs that lie otherwise, and a dropout behind")
    parser.add_argument("--verify", action="store_true", help="with the check of first runs, which must refuse nothing")
    parser.add_argument("--seconds", type=float, default=math.inf)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    autocast = None if options.autocast is None else getattr(torch, options.autocast)
    start, done, failed = time.monotonic(), 0, 0
    # convolutions round to 10 bits by default on a GPU, of which the bounds here know nothing
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        chosen = [
            (op, dtype)
            for dtype in (getattr(torch, name) for name in options.dtype)
            for op in operators(dtype, options.names, options.device)[options.first :: options.every]
        ]
        for op, dtype in chosen:
            for number, sample in enumerate(samples(op, dtype, options.samples, options.device)):
                if time.monotonic() - start > options.seconds:
                    break
                if options.layouts and op.name in _OTHER_STRIDES:
                    continue
                problem = check(op, sample, verify=options.verify, autocast=autocast, layouts=options.layouts)
                done += 1
                if problem is not None:
                    failed += 1
                    print(f"{op.full_name} {dtype}, sample {number}: {problem}", flush=True)
    print(f"{done} samples, {failed} failed, {time.monotonic() - start:.0f} s")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
