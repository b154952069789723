"""Rounding made visible: torch's own computation with a little noise wherever it rounds."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ort.runtime.memory import storage_key

__all__ = ["RoundingNoise"]

# Half units in the last place. More than the half unit of one rounding: another implementation sums in another order
# and forms another polynomial, and a decision that it takes otherwise must fall otherwise in some of a few samples.
_UNITS = {torch.float64: 4.0, torch.float32: 4.0, torch.float16: 4.0, torch.bfloat16: 4.0}
# A sum of n terms is rounded n times at about the size of its partial sums. Kernels keep several partial sums and add
# up blocks, so that the noise of the terms grows with the root of n to begin with, and not without end.
_LANES, _LONGEST_BLOCK = 16, 16384
_PIECE = 1 << 20  # entries that are disturbed at once

_EXACT = frozenset([
    "abs", "adaptive_max_pool2d", "adaptive_max_pool3d", "amax", "amin", "aminmax", "as_strided", "cat", "ceil",
    "clamp", "clamp_max", "clamp_min", "clone", "constant_pad_nd", "copy", "copysign", "cummax", "cummin", "detach",
    "diag_embed", "diagonal_backward", "diagonal_scatter", "embedding", "expand_copy", "fill", "flip", "floor",
    "fmax", "fmin", "frac", "fractional_max_pool2d", "fractional_max_pool3d", "gather", "hardshrink", "hardtanh",
    "hardtanh_backward", "heaviside", "index", "index_copy", "index_fill", "index_select", "kthvalue", "lift_fresh",
    "masked_fill", "masked_scatter", "masked_select", "max", "max_pool2d_with_indices", "max_pool3d_with_indices",
    "max_unpool2d", "max_unpool3d", "maximum", "median", "min", "minimum", "mode", "nan_to_num", "nanmedian",
    "native_dropout", "neg", "nextafter", "pixel_shuffle", "pixel_unshuffle", "reflection_pad1d", "reflection_pad2d",
    "reflection_pad3d", "relu", "repeat", "replication_pad1d", "replication_pad2d", "replication_pad3d", "roll",
    "round", "scatter", "select_backward", "select_scatter", "sgn", "sign", "slice_backward", "slice_scatter", "sort",
    "split_with_sizes_copy", "stack", "threshold", "threshold_backward", "_to_copy", "topk", "tril", "triu", "trunc",
    "unsafe_split", "where", "zero",
])  # fmt: skip
"""Operators that pass values on, or choose among them, without rounding."""

_UNTAGGED = frozenset([
    "_prelu_kernel_backward", "binary_cross_entropy_backward", "elu_backward", "hardsigmoid_backward",
    "hardswish_backward", "huber_loss_backward", "leaky_relu_backward", "log_sigmoid_backward", "mish_backward",
    "mse_loss_backward", "smooth_l1_loss_backward", "softplus_backward",
])  # fmt: skip
"""Elementwise operators to which torch gives no tag that says so."""

_SATURATING = frozenset(["_softmax", "_safe_softmax", "sigmoid", "tanh", "erf"])
"""Operators whose results are 1 only because they have been rounded; what is left of 1 decides about gradients."""

_KEEPING = _SATURATING | {"mul", "mul_", "square", "pow", "sqrt", "div", "reciprocal"}
"""Operators that give no more than 1 where none is due, whoever computes them: 1 - x² is not negative."""

_CENTRED: Mapping[str, Callable[[Any], Sequence[int]]] = {
    **dict.fromkeys(
        ["native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "native_batch_norm_backward"],
        lambda args: [d for d in range(args[0].dim()) if d != 1],
    ),
    "native_layer_norm": lambda args: range(-len(args[1]), 0),
    "native_layer_norm_backward": lambda args: range(-len(args[2]), 0),
    "native_group_norm": lambda args: range(1, args[0].dim()),
    "native_group_norm_backward": lambda args: range(1, args[0].dim()),
    **dict.fromkeys(["_softmax_backward_data", "_log_softmax_backward_data"], lambda args: [args[2]]),
}
"""Operators that subtract a mean (group norm: one or several), and the dimensions over which that is taken.

What rounds the mean moves all entries in the same direction: their sum, which is zero without rounding, is off by far
more than the noise of single entries adds up to. The gradient of a bias in front of a batch norm is such a sum."""

_WITH_BUFFERS = frozenset(
    ["native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm"]
)
"""Operators that change arguments behind the first, whatever their schemas say."""


class RoundingNoise(TorchDispatchMode):
    """While entered, whatever an operator rounds is off by a few units in the last place of its type.

    The spread of a few such computations is the noise of the result: small where values are small, large where they
    cancel, and with other decisions (which side of zero, which of two candidates) where rounding alone makes them.
    Small integers and fractions such as 0.5 stay as they are, as do random numbers.

    Args:
        seed: of the noise, which leaves torch's random state alone.
        device: of the tensors.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        self._generators = {"cpu": torch.Generator().manual_seed(seed)}
        if device.type != "cpu":
            self._generators[device.type] = torch.Generator(device).manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if not isinstance(func, torch._ops.OpOverload) or _is_exact(func):
            return func(*args, **keywords)
        given = [x for x in pytree.tree_leaves((args, keywords)) if isinstance(x, torch.Tensor)]
        growth = 1.0
        if torch.Tag.pointwise not in func.tags and func._opname not in _UNTAGGED:
            growth = _growth(func, args, given)
            args = self._noisy_terms(func, args, max(growth, _of_tf32(func._opname, given)))
        results = func(*args, **keywords)
        storages = {storage_key(x) for x in given if x.layout == torch.strided}
        written = func._schema.is_mutable
        for x in pytree.tree_leaves(results):
            if _is_rounded(x) and (written or storage_key(x) not in storages):
                self._disturb(x, 1.0, everywhere=func._opname in _SATURATING, keeping=func._opname in _KEEPING)
                if func._opname == "_log_softmax":
                    self._disturb_zeros(x)
        if func._opname in _CENTRED:
            centred = next(iter(pytree.tree_leaves(results)))
            if _is_rounded(centred):
                self._disturb_mean(centred, list(_CENTRED[func._opname](args)), growth)
        return results

    def _noisy_terms(self, func: Any, args: tuple[Any, ...], growth: float) -> tuple[Any, ...]:
        """Arguments of an operator that sums, or divides by what it sums, each with noise of its own."""
        read = 1 if func._opname in _WITH_BUFFERS else len(args)

        def noisy(x: Any) -> Any:
            # sums of 16-bit numbers are formed in float32
            return self._disturb(x.clone(), growth if x.dtype.itemsize >= 4 else 1.0) if _is_rounded(x) else x

        return tuple(
            noisy(x) if i < read and isinstance(x, torch.Tensor) and not _is_written(func, i) else x
            for i, x in enumerate(args)
        )

    def _disturb_zeros(self, x: torch.Tensor) -> None:
        """The logarithm of a share that is 1 is a difference of larger numbers."""
        amplitude = _UNITS[x.dtype] * torch.finfo(x.dtype).eps / 2
        noise = torch.empty(x.shape, dtype=torch.float64, device=x.device)
        noise.uniform_(-amplitude, amplitude, generator=self._generators[x.device.type])
        x.add_(noise.mul_(x == 0).to(x.dtype))

    def _disturb_mean(self, x: torch.Tensor, dims: Sequence[int], growth: float) -> None:
        """Move what shares a mean over ``dims`` together, by what one entry of it may be off.

        Sums of 16-bit numbers are formed in float32, but where many entries are about the same, all are rounded alike.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        size = torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=wide)
        size.mul_(math.sqrt(size.numel() / x.numel()))
        amplitude = (growth if x.dtype == wide else 1.0) * _UNITS[x.dtype] * torch.finfo(x.dtype).eps / 2
        noise = torch.empty_like(size).uniform_(-amplitude, amplitude, generator=self._generators[x.device.type])
        x.copy_(x + noise.mul_(size).nan_to_num_(0.0, 0.0, 0.0))

    def _disturb(
        self, x: torch.Tensor, growth: float, *, everywhere: bool = False, keeping: bool = False
    ) -> torch.Tensor:
        amplitude = growth * _UNITS[x.dtype] * torch.finfo(x.dtype).eps / 2
        # in blocks, so that the noise of a large tensor takes no memory worth mentioning
        if x.is_contiguous() and x.numel() > _PIECE:
            for part in x.view(-1).split(_PIECE):
                self._disturb_part(part, amplitude, everywhere=everywhere, keeping=keeping)
        elif not any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)):
            self._disturb_part(x, amplitude, everywhere=everywhere, keeping=keeping)
        return x

    def _disturb_part(self, x: torch.Tensor, amplitude: float, *, everywhere: bool, keeping: bool) -> None:
        noise = torch.empty(
            x.shape, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32, device=x.device
        )
        noise.uniform_(-amplitude, amplitude, generator=self._generators[x.device.type])
        if not everywhere:
            noise.mul_(_is_inexact(x))
        change = noise.mul_(x).nan_to_num_(0.0, 0.0, 0.0)  # what is infinite stays so
        within = x.abs() <= 1 if keeping else None
        if x.dtype.itemsize >= 4:
            x.add_(change)
        else:
            x.copy_(x + change)
        if within is not None:
            x.copy_(torch.where(within, x.clamp(-1.0, 1.0), x))


def _is_rounded(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in _UNITS and x.layout == torch.strided and x.numel() > 0


def _is_inexact(x: torch.Tensor) -> torch.Tensor:
    """Where entries have so many digits that they are probably rounded ones."""
    if x.dtype == torch.float32:
        return x.view(torch.int32).bitwise_and(0xFFF) != 0
    if x.dtype == torch.float64:
        return x.view(torch.int64).bitwise_and(0xFFFFFF) != 0
    return x != x.round()


@functools.cache
def _is_exact(func: Any) -> bool:
    schema = func._schema
    name = func._opname
    if name in _EXACT or (name.endswith("_") and name[:-1] in _EXACT) or torch.Tag.nondeterministic_seeded in func.tags:
        return True
    if not any("Tensor" in str(a.type) for a in schema.arguments):
        return True  # made anew
    aliases = [r.alias_info for r in schema.returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


@functools.cache
def _is_written(func: Any, position: int) -> bool:
    arguments = func._schema.arguments
    info = arguments[position].alias_info if position < len(arguments) else None
    return info is not None and info.is_write


def _growth(func: Any, args: tuple[Any, ...], given: Iterable[torch.Tensor]) -> float:
    """Noise of each term of the sums that ``func`` forms, as a multiple of that of one rounding."""
    name = func._opname
    if name in _PRODUCTS:
        terms = args[_PRODUCTS[name]].shape[-1] if args[_PRODUCTS[name]].dim() else 1
    elif name == "convolution":
        terms = args[1][0].numel()
    else:
        # what it sums over is not known: at most all but a row
        sizes = [x.numel() / max(1, max(x.shape, default=1) if x.dim() < 2 else x.shape[1]) for x in given]
        terms = max(sizes, default=1)
    return max(1.0, math.sqrt(min(terms, _LONGEST_BLOCK) / _LANES))


def _of_tf32(name: str, given: Sequence[torch.Tensor]) -> float:
    """How much more than float32 an operator rounds what it multiplies, where a GPU takes factors of 10 bits."""
    settings = _MULTIPLYING.get(name)
    if settings is None:
        return 1.0
    first, *_ = given
    if first.device.type != "cuda" or first.dtype != torch.float32 or settings().fp32_precision != "tf32":
        return 1.0
    return 2.0**-10 / torch.finfo(torch.float32).eps


_MULTIPLYING: Mapping[str, Callable[[], Any]] = {
    **dict.fromkeys(
        ["mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot"], lambda: torch.backends.cuda.matmul
    ),
    **dict.fromkeys(["convolution", "convolution_backward"], lambda: torch.backends.cudnn.conv),  # type: ignore[attr-defined]
    **dict.fromkeys(["_cudnn_rnn", "_cudnn_rnn_backward"], lambda: torch.backends.cudnn.rnn),
}
"""Operators that multiply, and what says in which precision they do so on a GPU."""

_PRODUCTS: Mapping[str, int] = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "addbmm": 1, "mv": 0, "addmv": 1, "dot": 0}
"""Position of the left factor of matrix products."""
