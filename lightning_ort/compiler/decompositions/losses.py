"""Losses whose rewriting in torch is wrong, or not the cheapest in ONNX."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ort.compiler.decompositions.checks import refuse_unless
from lightning_ort.compiler.decompositions.composites import composes
from lightning_ort.compiler.decompositions.registry import decomposes, keeps

aten = torch.ops.aten

keeps(
    aten.nll_loss_forward.default, aten.nll_loss_backward.default,
    aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default,
)  # fmt: skip


@composes(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss_forward(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """Torch's own rewriting also counts the labels after the first -1, as if they were class 0."""
    shape = x.shape
    x, target = torch.atleast_2d(x), torch.atleast_2d(target)
    classes = x.shape[1]
    refuse_unless((target >= -1) & (target < classes), "the target of a multi-label margin loss is out of range")
    index = torch.arange(classes)
    valid = index < torch.where(target == -1, index, classes).amin(-1, keepdim=True)
    at_target = x.gather(1, torch.where(valid, target, 0))
    is_target = (index == torch.where(valid, target, -1).unsqueeze(-1)).any(1)
    # one margin for each pair of a label and a class that is none
    margins = (1 - at_target.unsqueeze(-1) + x.unsqueeze(1)).clamp_min(0)
    counted = valid.unsqueeze(-1) & ~is_target.unsqueeze(1)
    loss = torch.where(counted, margins, 0).sum((1, 2)) / classes
    loss = loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss
    return (loss if len(shape) > 1 or reduction else loss.squeeze(0)), is_target.to(x.dtype).reshape(shape)


@composes(aten.binary_cross_entropy.default)
def binary_cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1) -> Any:
    """Left to torch, which rewrites it without the checks of its kernel."""
    outside = _outside_of_unit_interval(x.detach()) + _outside_of_unit_interval(target.detach())
    refuse_unless(outside.sum() == 0, "all elements of input and target should be between 0 and 1")
    return NotImplemented


def _outside_of_unit_interval(x: Tensor) -> Tensor:
    """0 for what is inside, else negative or NaN; arithmetic costs half of what comparisons do in ONNX Runtime."""
    product = x * (1 - x)
    return product - product.abs()


def _reduced(loss: Tensor, reduction: int) -> Tensor:
    return loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss


def _bounded_gradient(grad: Tensor, slope: Tensor, reduction: int) -> Tensor:
    return grad / slope.numel() * slope if reduction == 1 else grad * slope


@decomposes(aten.smooth_l1_loss.default)
def smooth_l1_loss(x: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> Tensor:
    if beta == 0:
        return _reduced((x - target).abs(), reduction)
    distance = (x - target).abs()
    near = distance.clamp(max=beta)
    return _reduced((distance - near * 0.5) * near / beta, reduction)


@decomposes(aten.smooth_l1_loss_backward.default)
def smooth_l1_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    difference = x - target
    slope = difference.sign() if beta == 0 else (difference / beta).clamp(-1, 1)
    return _bounded_gradient(grad, slope, reduction)


@decomposes(aten.huber_loss.default)
def huber_loss(x: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    distance = (x - target).abs()
    near = distance.clamp(max=delta)
    return _reduced((distance - near * 0.5) * near, reduction)


@decomposes(aten.huber_loss_backward.default)
def huber_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, delta: float) -> Tensor:
    return _bounded_gradient(grad, (x - target).clamp(-delta, delta), reduction)
