"""Distances and products that torch has single kernels for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_ort.compiler.decompositions.registry import composes, decomposes

aten = torch.ops.aten


@composes(aten.bilinear.default, casting=True)
def bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W_k y for each k, as two products instead of one over a four-dimensional intermediate.

    Under autocast torch's own products are cast as well, and their sums kept in the type of ``x``.
    """
    outputs, width, _ = weight.shape
    left = x.reshape(-1, width) @ weight.permute(1, 0, 2).reshape(width, -1)
    products = left.reshape(-1, outputs, y.shape[-1]) @ y.reshape(-1, y.shape[-1], 1)
    result = products.reshape(*x.shape[:-1], outputs).to(x.dtype)
    return result if bias is None else (result + bias).to(x.dtype)


@decomposes(aten.addmv.default)
def addmv(c: Tensor, a: Tensor, v: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if not a.is_floating_point():
        return NotImplemented
    product = torch.mv(a, v) * alpha
    return product if beta == 0 else c * beta + product


@decomposes(aten.addbmm.default)
def addbmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """The sum over the batch is a product of its own: batch and inner dimension taken as one."""
    left, right = a.transpose(0, 1).reshape(a.shape[1], -1), b.reshape(-1, b.shape[2])
    return torch.addmm(c, left, right, beta=beta, alpha=alpha)


def _distance(difference: Tensor, p: float) -> Tensor:
    size = difference.abs()
    if p == 2:
        return (difference * difference).sum(-1).sqrt()
    if p == 1:
        return size.sum(-1)
    if p == 0:
        return torch.where(size > 0, 1, size).sum(-1)
    if math.isinf(p):
        return size.nan_to_num(0, math.inf).amax(-1)  # torch's maximum passes over NaN
    return size.pow(p).sum(-1).pow(1 / p)


def _distance_backward(grad: Tensor, difference: Tensor, p: float, distance: Tensor) -> Tensor:
    """Gradient by ``difference``; 0 where the distance is, as in torch."""
    if p == 0:
        return torch.zeros_like(difference)
    grad, distance = grad.unsqueeze(-1), distance.unsqueeze(-1)
    sign = torch.where(difference != difference, difference, difference.sign())
    if p == 1:
        return grad * sign
    if math.isinf(p):
        # NaN, as in torch, where an infinity is the greatest distance
        return grad * sign * (1 - (difference.abs() - distance).abs().ceil().clamp(max=1))
    apart = distance != 0
    safe = torch.where(apart, distance, 1)
    scale = torch.where(apart, grad, 0) / safe.pow(p - 1)
    if p == 2:
        return scale * difference
    size = difference.abs()
    # 0 to a negative power is infinite
    return scale * difference.sign() * (size.pow(p - 1) if p > 1 else torch.where(size == 0, 1, size).pow(p - 1))


@decomposes(aten._cdist_forward.default)
def cdist(x: Tensor, y: Tensor, p: float, compute_mode: int | None) -> Tensor:
    return _distance(x.unsqueeze(-2) - y.unsqueeze(-3), p)


@decomposes(aten._cdist_backward.default)
def cdist_backward(grad: Tensor, x: Tensor, y: Tensor, p: float, distance: Tensor) -> Tensor:
    return _distance_backward(grad, x.unsqueeze(-2) - y.unsqueeze(-3), p, distance).sum(-2)


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device)
    return rows, columns


@decomposes(aten._pdist_forward.default)
def pdist(x: Tensor, p: float = 2) -> Tensor:
    rows, columns = _pairs(x)
    return _distance(x[rows] - x[columns], p)


@decomposes(aten._pdist_backward.default)
def pdist_backward(grad: Tensor, x: Tensor, p: float, distance: Tensor) -> Tensor:
    rows, columns = _pairs(x)
    by_pair = _distance_backward(grad, x[rows] - x[columns], p, distance)
    return torch.zeros_like(x).index_add(0, rows, by_pair).index_add(0, columns, -by_pair)


@decomposes(aten.dist.default)
def dist(x: Tensor, y: Tensor, p: float = 2) -> Tensor:
    return torch.linalg.vector_norm(x - y, p)
