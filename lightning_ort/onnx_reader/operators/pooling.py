"""Pooling."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ort.errors import UnsupportedError
from lightning_ort.onnx_reader.operators.convolution import ones_like_plane, padded, volume, window_pads
from lightning_ort.onnx_reader.registry import operator

__all__: list[str] = []

_MAX: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _full(
    x: Tensor, kernel: list[int], strides: list[int], dilations: list[int], before: list[Any], after: list[Any]
) -> list[Any]:
    """Padding after each axis by which the last window of ``ceil_mode=1`` becomes a whole one.

    A window that would begin beyond the data, in the padding after it, is none.
    """
    found = []
    for n, k, s, d, b, a in zip(x.shape[2:], kernel, strides, dilations, before, after, strict=True):
        reach = d * (k - 1) + 1
        last = torch.sym_min(-(-(n + b + a - reach) // s), (n + b - 1) // s)
        found.append(last * s + reach - n - b)
    return found


def _fits(kernel: list[int], before: list[Any], after: list[Any]) -> bool:
    """Whether torch's pooling can do the padding itself."""
    return before == after and all(isinstance(p, int) and 2 * p <= k for p, k in zip(before, kernel, strict=True))


@operator("MaxPool")
def max_pool(
    x: Tensor,
    *,
    kernel_shape: list[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: list[int] | None = None,
    pads: list[int] | None = None,
    storage_order: int = 0,
    strides: list[int] | None = None,
    n_outputs: int,
) -> Tensor | tuple[Tensor, Tensor]:
    rank = len(kernel_shape)
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    before, after = window_pads(x, kernel_shape, strides, dilations, pads, auto_pad)
    own = x
    # torch would settle an open size to know whether there is a last window
    cut = ceil_mode and any(isinstance(n, torch.SymInt) for n in x.shape[2:])
    if cut or not _fits(kernel_shape, before, after):
        lowest = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
        after = _full(x, kernel_shape, strides, dilations, before, after) if ceil_mode else after
        x, before, ceil_mode = padded(x, before, after, lowest), [0] * rank, 0
    pool = _MAX[rank]
    if n_outputs == 1:
        return pool(x, kernel_shape, strides, before, dilations, bool(ceil_mode))
    if x is not own or storage_order:
        raise UnsupportedError("MaxPool: indices with asymmetric padding or in column order cannot be read")
    y, indices = pool(x, kernel_shape, strides, before, dilations, bool(ceil_mode), return_indices=True)
    # torch counts within a plane, ONNX within the whole tensor
    planes = x.shape[0] * x.shape[1]
    plane = 1
    for s in x.shape[2:]:
        plane = plane * s
    first = torch.arange(planes, device=x.device) * plane
    return y, indices + first.reshape(x.shape[0], x.shape[1], *[1] * rank)


@operator("AveragePool")
def average_pool(
    x: Tensor,
    *,
    kernel_shape: list[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    rank = len(kernel_shape)
    if dilations and any(d != 1 for d in dilations):
        raise UnsupportedError("AveragePool: dilations other than 1 cannot be read")
    strides = strides or [1] * rank
    before, after = window_pads(x, kernel_shape, strides, [1] * rank, pads, auto_pad)
    pool, ceil = _AVERAGE[rank], bool(ceil_mode)
    if _fits(kernel_shape, before, after):
        return pool(x, kernel_shape, strides, before, ceil, bool(count_include_pad))
    counted = ones_like_plane(x)
    if count_include_pad:
        if not ceil:
            return pool(padded(x, before, after), kernel_shape, strides)
        counted = padded(counted, before, after, 1.0)
        rest = _full(x, kernel_shape, strides, [1] * rank, before, after)
        counted = padded(counted, [0] * rank, [r - a for r, a in zip(rest, after, strict=True)])
        after = rest
    else:
        after = _full(x, kernel_shape, strides, [1] * rank, before, after) if ceil else after
        counted = padded(counted, before, after)
    return pool(padded(x, before, after), kernel_shape, strides) / pool(counted, kernel_shape, strides)


@operator("LpPool")
def lp_pool(
    x: Tensor,
    *,
    kernel_shape: list[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: list[int] | None = None,
    p: int = 2,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    rank = len(kernel_shape)
    if dilations and any(d != 1 for d in dilations):
        raise UnsupportedError("LpPool: dilations other than 1 cannot be read")
    strides = strides or [1] * rank
    before, after = window_pads(x, kernel_shape, strides, [1] * rank, pads, auto_pad)
    if ceil_mode:  # the mean over a window that is cut would not be over the whole kernel
        after = _full(x, kernel_shape, strides, [1] * rank, before, after)
    mean = _AVERAGE[rank](padded(x.abs() ** p, before, after), kernel_shape, strides)
    return (mean * volume(kernel_shape)) ** (1 / p)


@operator("GlobalAveragePool")
def global_average_pool(x: Tensor) -> Tensor:
    return x.mean(list(range(2, x.dim())), keepdim=True)


@operator("GlobalMaxPool")
def global_max_pool(x: Tensor) -> Tensor:
    return x.amax(list(range(2, x.dim())), keepdim=True)


@operator("GlobalLpPool")
def global_lp_pool(x: Tensor, *, p: int = 2) -> Tensor:
    return torch.linalg.vector_norm(x, p, list(range(2, x.dim())), keepdim=True)
