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
    if not _fits(kernel_shape, before, after):
        lowest = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
        x, before = padded(x, before, after, lowest), [0] * rank
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
    if count_include_pad:
        return pool(padded(x, before, after), kernel_shape, strides, 0, ceil)
    total = pool(padded(x, before, after), kernel_shape, strides, 0, ceil)
    share = pool(padded(ones_like_plane(x), before, after), kernel_shape, strides, 0, ceil)
    return total / share


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
    powers = x.abs() ** p
    mean = average_pool(
        powers, kernel_shape=kernel_shape, auto_pad=auto_pad, ceil_mode=ceil_mode, count_include_pad=1,
        dilations=dilations, pads=pads, strides=strides,
    )  # fmt: skip
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
