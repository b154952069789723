"""Products, extrema and medians, with the gradients of torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lightning_ort.compiler.decompositions.registry import composes

aten = torch.ops.aten


class _Product(torch.autograd.Function):
    """The gradient is a quotient, unless there is a zero to divide by.

    Chooses in the graph what torch decides by the data; its own tracing would take the way without quotients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, of_all: bool) -> Tensor:
        product = aten.prod.dim_int(x, dim, True)
        ctx.save_for_backward(x, product)
        ctx.dim, ctx.of_all = dim, of_all
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, product), dim = ctx.saved_tensors, ctx.dim
        zeros = x == 0
        found = torch.where(zeros.any(), grad * _products_of_others(x, dim), grad * product / x)
        # of a product of everything, torch looks no further then
        return torch.where(zeros.sum() > 1, 0, found) if ctx.of_all else found, None, None


def _products_of_others(x: Tensor, dim: int) -> Tensor:
    if statically_known_true(x.shape[dim] == 1):
        return torch.ones_like(x)
    ones, rest = torch.ones_like(x.narrow(dim, 0, 1)), x.shape[dim] - 1
    before = torch.cat([ones, x.narrow(dim, 0, rest)], dim).cumprod(dim)
    after = torch.cat([ones, x.narrow(dim, 1, rest).flip(dim)], dim).cumprod(dim).flip(dim)
    return before * after


@composes(aten.prod.dim_int, native=True)
def prod(x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if not (x.requires_grad and torch.is_grad_enabled()) or not x.dim() or dtype not in (None, x.dtype):
        return NotImplemented
    return _differentiable(x, dim, keepdim)


def _differentiable(x: Tensor, dim: int, keepdim: bool, of_all: bool = False) -> Tensor:
    product = _Product.apply(x, dim, of_all)
    return product if keepdim else product.squeeze(dim)


@composes(aten.prod.default, native=True)
def prod_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    if not (x.requires_grad and torch.is_grad_enabled()) or dtype not in (None, x.dtype):
        return NotImplemented
    return _differentiable(x.reshape(-1), 0, False, of_all=True)


class _Chosen(torch.autograd.Function):
    """A number out of x by one of torch's functions, and its gradient for those entries that are it, by equal parts.

    Torch's own tracing would multiply the gradient by a mask, which makes NaN of the others if it is NaN or infinite.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
        chosen = choose(x)
        context.save_for_backward(x, chosen)
        return chosen

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Any:
        x, chosen = context.saved_tensors
        is_it = (x == chosen) | ((x != x) & (chosen != chosen))
        return torch.where(is_it, grad / is_it.sum(), 0), None


def _of_all(choose: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    def composed(x: Tensor) -> Any:
        return _Chosen.apply(x, choose) if x.requires_grad and torch.is_grad_enabled() else NotImplemented

    return composed


for _choose in (aten.max.default, aten.min.default, aten.median.default, aten.nanmedian.default):
    composes(_choose, native=True)(_of_all(_choose))
