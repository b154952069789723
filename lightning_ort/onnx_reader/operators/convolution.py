"""Convolutions."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ort.errors import UnsupportedError
from lightning_ort.onnx_reader.registry import operator

__all__: list[str] = []

_CONVOLUTIONS: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def window_pads(
    x: Tensor, kernel: list[int], strides: list[int], dilations: list[int], pads: list[int] | None, auto_pad: str
) -> tuple[list[Any], list[Any]]:
    """Padding before and after each spatial axis, from ``pads`` or from the rule ``auto_pad``.

    Raises:
        UnsupportedError: strides leap over more than one element between windows, so that ``auto_pad`` would be a
            padding of less than nothing, of which versions of ONNX Runtime make different results.
    """
    count = len(kernel)
    if auto_pad in ("NOTSET", ""):
        pads = pads or [0] * (2 * count)
        return pads[:count], pads[count:]
    if auto_pad == "VALID":
        return [0] * count, [0] * count
    before, after = [], []
    for size, k, s, d in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        total = (-(-size // s) - 1) * s + (k - 1) * d + 1 - size
        leaps = (k - 1) * d + 1 - s
        if leaps < -1 and (isinstance(size, torch.SymInt) or total < -1):
            at = "some sizes that are left open" if isinstance(size, torch.SymInt) else f"a size of {size}"
            raise UnsupportedError(
                f"auto_pad={auto_pad!r} with a stride of {s} over windows of {(k - 1) * d + 1} elements takes away "
                f"elements at {at}, of which versions of ONNX Runtime make different results; give pads instead"
            )
        total = torch.sym_max(total, 0) if leaps < 0 else total
        small, large = total // 2, total - total // 2
        before.append(small if auto_pad == "SAME_UPPER" else large)
        after.append(large if auto_pad == "SAME_UPPER" else small)
    return before, after


def padded(x: Tensor, before: list[Any], after: list[Any], value: float = 0.0) -> Tensor:
    """``x`` with its last axes padded."""
    amounts = [a for pair in zip(reversed(before), reversed(after), strict=True) for a in pair]
    return F.pad(x, amounts, value=value) if any(not isinstance(a, int) or a != 0 for a in amounts) else x


def _rank(weight: Tensor, functions: dict[int, Any]) -> int:
    rank = weight.dim() - 2
    if rank not in functions:
        raise UnsupportedError(f"convolutions over {rank} axes cannot be read; 1, 2 and 3 can")
    return rank


@operator("Conv")
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    rank = _rank(weight, _CONVOLUTIONS)
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    before, after = window_pads(x, list(weight.shape[2:]), strides, dilations, pads, auto_pad)
    padding = list(before)
    if any(isinstance(a, torch.SymInt) for a in (*before, *after)) or before != after:
        x, padding = padded(x, before, after), [0] * rank
    return _CONVOLUTIONS[rank](x, weight, bias, strides, padding, dilations, group)


@operator("ConvTranspose")
def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    output_padding: list[int] | None = None,
    output_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    rank = _rank(weight, _TRANSPOSED)
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    extra = output_padding or [0] * rank
    kernel = list(weight.shape[2:])
    before, after = _transposed_pads(x, kernel, strides, dilations, extra, pads, auto_pad, output_shape)
    if before == after:
        return _TRANSPOSED[rank](x, weight, bias, strides, before, extra, group, dilations)
    y = _TRANSPOSED[rank](x, weight, None, strides, 0, extra, group, dilations)
    y = padded(y, [-b for b in before], [-a for a in after])
    return y if bias is None else y + bias.reshape(-1, *[1] * rank)


def _transposed_pads(
    x: Tensor,
    kernel: list[int],
    strides: list[int],
    dilations: list[int],
    extra: list[int],
    pads: list[int] | None,
    auto_pad: str,
    output_shape: list[int] | None,
) -> tuple[list[Any], list[Any]]:
    rank = len(kernel)
    if output_shape is None and auto_pad in ("NOTSET", "", "VALID"):
        pads = pads if pads and auto_pad != "VALID" else [0] * (2 * rank)
        return pads[:rank], pads[rank:]
    sizes = list(x.shape[2:])
    wanted = output_shape[-rank:] if output_shape else [n * s for n, s in zip(sizes, strides, strict=True)]
    before, after = [], []
    for n, k, s, d, e, w in zip(sizes, kernel, strides, dilations, extra, wanted, strict=True):
        total = s * (n - 1) + e + (k - 1) * d + 1 - w
        if total < 0:  # more than there is: nothing is added to what lies beyond
            before.append(0)
            after.append(total)
            continue
        small, large = total // 2, total - total // 2
        before.append(small if auto_pad == "SAME_UPPER" else large)
        after.append(large if auto_pad == "SAME_UPPER" else small)
    return before, after


@operator("GridSample")
def grid_sample(
    x: Tensor, grid: Tensor, *, mode: str = "linear", padding_mode: str = "zeros", align_corners: int = 0
) -> Tensor:
    kinds = {"linear": "bilinear", "cubic": "bicubic"}
    return F.grid_sample(x, grid, kinds.get(mode, mode), padding_mode, bool(align_corners))


def volume(kernel: list[int]) -> int:
    """Number of elements of a window."""
    return math.prod(kernel)


def ones_like_plane(x: Tensor) -> Tensor:
    """Ones with the spatial axes of ``x`` and one row and channel."""
    return torch.ones([1, 1, *x.shape[2:]], dtype=x.dtype, device=x.device)
