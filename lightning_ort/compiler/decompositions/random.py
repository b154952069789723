"""Random operators reduced to draws that do not depend on values computed in the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ort.compiler.decompositions.registry import decomposes, keeps
from lightning_ort.compiler.random import dropout_factor

aten = torch.ops.aten

# Draws one number for each negative input, in order: what is drawn depends on the data, so torch runs it.
keeps(aten.rrelu_with_noise_functional.default)


@decomposes(aten.native_dropout.default)
def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """The mask is drawn as ``F.dropout`` does, and returned as the factor by which x was multiplied.

    Only :func:`native_dropout_backward` reads it, and multiplying by the same factor spares the graph a pass.
    """
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return x * 0, torch.zeros_like(x, dtype=torch.bool)
    if x.device.type == "cuda":
        factor = dropout_factor(x, p)
    else:
        factor = aten.bernoulli.p(torch.empty_like(x), 1 - p) / (1 - p)
    return x * factor, factor


@decomposes(aten.native_dropout_backward.default)
def native_dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    return grad * (mask.to(grad.dtype) * scale if mask.dtype == torch.bool else mask)


@decomposes(aten.rrelu_with_noise_backward.default)
def rrelu_with_noise_backward(
    grad: Tensor, x: Tensor, noise: Tensor, lower: float, upper: float, training: bool, self_is_result: bool
) -> Tensor:
    if training and upper - lower > 1e-6:
        return grad * noise
    return torch.where(x > 0, grad, grad * ((lower + upper) / 2))


@decomposes(aten.bernoulli.default)
def bernoulli(p: Tensor) -> Any:
    if p.device.type == "cuda":  # its kernel draws other numbers than that of uniform_
        return NotImplemented
    return (torch.empty_like(p, memory_format=torch.contiguous_format).uniform_() < p).to(p.dtype)


@decomposes(aten.bernoulli.Tensor)
def bernoulli_tensor(x: Tensor, p: Tensor) -> Any:
    if x.device.type == "cuda":
        return NotImplemented
    uniform = torch.empty_like(x, dtype=p.dtype).uniform_()
    return (uniform < p).to(x.dtype)


@decomposes(aten.normal.Tensor_float)
def normal_tensor_float(mean: Tensor, std: float = 1.0) -> Tensor:
    return torch.empty_like(mean, memory_format=torch.contiguous_format).normal_(0, std) + mean


@decomposes(aten.normal.float_Tensor)
def normal_float_tensor(mean: float, std: Tensor) -> Tensor:
    return torch.empty_like(std, memory_format=torch.contiguous_format).normal_() * std + mean


@decomposes(aten.normal.Tensor_Tensor)
def normal_tensor_tensor(mean: Tensor, std: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(mean.shape, std.shape)
    return torch.empty(shape, dtype=mean.dtype, device=mean.device).normal_() * std + mean


@decomposes(aten.multinomial.default)
def multinomial(weights: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    """The fastest of the weights divided by exponential draws, as eager does; replacement is left to torch."""
    if replacement and num_samples != 1:
        return NotImplemented
    race = weights / torch.empty_like(weights).exponential_()
    if num_samples == 1:
        return race.argmax(-1, keepdim=True)
    return race.topk(num_samples, -1)[1]
