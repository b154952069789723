"""Matrix products, and determinants."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ort.onnx_reader.registry import operator

__all__: list[str] = []


@operator("MatMul")
def matmul(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


@operator("Gemm")
def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,  # noqa: N803
    transB: int = 0,  # noqa: N803
) -> Tensor:
    a, b = a.t() if transA else a, b.t() if transB else b
    if c is None or beta == 0:  # what is infinite in c does not count either
        product = torch.mm(a, b)
        return product if alpha == 1 else product * alpha
    if alpha == 1 and beta == 1:
        return torch.addmm(c, a, b) if c.dim() <= 1 else torch.mm(a, b) + c
    return torch.mm(a, b) * alpha + c * beta


@operator("Det")
def det(x: Tensor) -> Tensor:
    return torch.linalg.det(x)


@operator("Einsum")
def einsum(*operands: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation, *operands)
