"""Products over dimensions, with the gradients of torch's own: quotients, unless there is a zero to divide by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ort.compiler.decompositions.registry import composes

aten = torch.ops.aten


class _Product(torch.autograd.Function):
    """Chooses in the graph what torch decides by the data; its own tracing would take the way without quotients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        product = aten.prod.dim_int(x, dim, True)
        ctx.save_for_backward(x, product)
        ctx.dim = dim
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, product), dim = ctx.saved_tensors, ctx.dim
        zeros = x == 0
        return torch.where(zeros.any(), grad * _products_of_others(x, dim), grad * product / x), None


def _products_of_others(x: Tensor, dim: int) -> Tensor:
    if x.shape[dim] == 1:
        return torch.ones_like(x)
    ones, rest = torch.ones_like(x.narrow(dim, 0, 1)), x.shape[dim] - 1
    before = torch.cat([ones, x.narrow(dim, 0, rest)], dim).cumprod(dim)
    after = torch.cat([ones, x.narrow(dim, 1, rest).flip(dim)], dim).cumprod(dim).flip(dim)
    return before * after


@composes(aten.prod.dim_int, native=True)
def prod(x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if not (x.requires_grad and torch.is_grad_enabled()) or not x.dim() or dtype not in (None, x.dtype):
        return NotImplemented
    if not isinstance(x.shape[dim], int):
        return NotImplemented
    product = _Product.apply(x, dim)
    return product if keepdim else product.squeeze(dim)


@composes(aten.prod.default, native=True)
def prod_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    if not (x.requires_grad and torch.is_grad_enabled()) or not all(isinstance(n, int) for n in x.shape):
        return NotImplemented
    return prod(x.reshape(-1), 0, dtype=dtype)
