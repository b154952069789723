"""Reductions over axes, and running sums."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_ort.onnx_reader.registry import CONTRIB, operator

__all__: list[str] = []


def _reduction(name: str, function: Callable[[Tensor, list[int], bool], Tensor]) -> None:
    """Register a reduction whose axes are an attribute (until opset 17) or an input.

    Over no axes, each element is reduced by itself.
    """

    @operator(name, sizes=["axes_input"])
    def reduce(
        x: Tensor,
        axes_input: list[int] | None = None,
        *,
        axes: list[int] | None = None,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Tensor:
        wanted = axes_input if axes is None else axes
        if not wanted:
            if noop_with_empty_axes:
                return function(x.unsqueeze(-1), [-1], False)
            wanted = list(range(x.dim()))
        return function(x, list(wanted), bool(keepdims)) if x.dim() else function(x.reshape(1), [0], False)


def _product(x: Tensor, axes: list[int], keepdims: bool) -> Tensor:
    for axis in sorted((a % x.dim() for a in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keepdims, dtype=x.dtype)
    return x


def _sum(x: Tensor, axes: list[int], keepdims: bool) -> Tensor:
    return torch.sum(x, axes, keepdim=keepdims, dtype=x.dtype)


def _mean(x: Tensor, axes: list[int], keepdims: bool) -> Tensor:
    if x.is_floating_point():
        return torch.mean(x, axes, keepdim=keepdims)
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    return torch.div(_sum(x, axes, keepdims), count, rounding_mode="trunc")


def _in_double(function: Callable[[Tensor, list[int], bool], Tensor]) -> Callable[[Tensor, list[int], bool], Tensor]:
    """Roots and logarithms of whole numbers are cut to whole numbers."""

    def compute(x: Tensor, axes: list[int], keepdims: bool) -> Tensor:
        if x.is_floating_point():
            return function(x, axes, keepdims)
        return function(x.double(), axes, keepdims).to(x.dtype)

    return compute


def _log_sum(x: Tensor, axes: list[int], keepdims: bool) -> Tensor:
    return _sum(x, axes, keepdims).log()


def _norm(x: Tensor, axes: list[int], keepdims: bool) -> Tensor:
    return torch.linalg.vector_norm(x, 2, axes, keepdims)


_reduction("ReduceSum", _sum)
_reduction("ReduceMean", _mean)
_reduction("ReduceProd", _product)
_reduction("ReduceMax", torch.amax)
_reduction("ReduceMin", torch.amin)
_reduction("ReduceL1", lambda x, axes, keepdims: _sum(x.abs(), axes, keepdims))
_reduction("ReduceL2", _in_double(_norm))
_reduction("ReduceSumSquare", lambda x, axes, keepdims: _sum(x * x, axes, keepdims))
_reduction("ReduceLogSum", _in_double(_log_sum))
_reduction("ReduceLogSumExp", _in_double(torch.logsumexp))


def _argument(name: str, function: Callable[..., Tensor]) -> None:
    @operator(name)
    def find(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
        if not select_last_index:
            return function(x, axis, keepdim=bool(keepdims))
        return x.shape[axis] - 1 - function(x.flip(axis), axis, keepdim=bool(keepdims))


_argument("ArgMax", torch.argmax)
_argument("ArgMin", torch.argmin)


@operator("CumSum", sizes=["axis"])
def cumsum(x: Tensor, axis: int | list[int], *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    dim = axis[0] if isinstance(axis, (list, tuple)) else axis
    x = x.flip(dim) if reverse else x
    if exclusive:  # a difference of sums would cancel, and make NaN of infinity
        first = x.new_zeros([1 if d == dim % x.dim() else n for d, n in enumerate(x.shape)])
        total = torch.cumsum(torch.cat([first, x], dim), dim, dtype=x.dtype).narrow(dim, 0, x.shape[dim])
    else:
        total = torch.cumsum(x, dim, dtype=x.dtype)
    return total.flip(dim) if reverse else total


@operator("ReduceAllL2", domain=CONTRIB)
def reduce_all_l2(*tensors: Tensor) -> Tensor:
    return torch.stack([t.square().sum() for t in tensors]).sum().sqrt()
