"""Losses whose rewriting in torch is wrong, or not the cheapest in ONNX."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ort.compiler.decompositions.registry import composes, decomposes, keeps, refuse_unless

aten = torch.ops.aten

keeps(
    aten.nll_loss_forward.default, aten.nll_loss_backward.default,
    aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default,
)  # fmt: skip


class _Sloped(torch.autograd.Function):
    """Numbers for the rows of x and what multiplies the gradients that arrive at them, as kernels of torch do it."""

    @staticmethod
    def forward(context: Any, x: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
        context.save_for_backward(slopes)
        return values.clone()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Any:
        return grad.unsqueeze(-1) * context.saved_tensors[0], None, None


@composes(aten.multi_margin_loss.default, native=True)
def multi_margin_loss(
    x: Tensor, target: Tensor, p: float = 1, margin: float = 1, weight: Tensor | None = None, reduction: int = 1
) -> Any:
    """Torch's own rewriting makes NaN of a margin that is NaN; the kernel adds up those that are above 0."""
    rows, labels = torch.atleast_2d(x), torch.atleast_1d(target)
    if p not in (1, 2) or rows.dim() != 2 or not rows.shape[1] or labels.shape != rows.shape[:1]:
        return NotImplemented  # torch's error
    labels = labels.unsqueeze(1)
    is_target = torch.arange(rows.shape[1], device=x.device) == labels
    margins = margin - rows.gather(1, labels) + rows
    positive, factor = ~is_target & (margins > 0), 1 / rows.shape[1]
    if weight is not None:
        factor = factor * weight[labels]
    losses = torch.where(positive, margins if p == 1 else margins * margins, 0) * factor
    slopes = torch.where(positive, torch.ones_like(margins) if p == 1 else 2 * margins, 0) * factor
    slopes = torch.where(is_target, -slopes.sum(1, keepdim=True), slopes)
    loss = _Sloped.apply(rows, losses.sum(1), slopes)
    return _reduced(loss, reduction) if reduction or x.dim() > 1 else loss.squeeze(0)


@composes(aten.multilabel_margin_loss_forward.default, native=True)
def multilabel_margin_loss_forward(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """Torch's own rewriting also counts the labels after the first -1, as if they were class 0."""
    shape = x.shape
    x, target = torch.atleast_2d(x), torch.atleast_2d(target)
    classes = x.shape[1]
    refuse_unless((target >= -1) & (target < classes), "the target of a multi-label margin loss is out of range")
    index = torch.arange(classes, device=x.device)
    valid = index < torch.where(target == -1, index, classes).amin(-1, keepdim=True)
    at_target = x.gather(1, torch.where(valid, target, 0))
    is_target = (index == torch.where(valid, target, -1).unsqueeze(-1)).any(1)
    # one margin for each pair of a label and a class that is none
    margins = 1 - at_target.unsqueeze(-1) + x.unsqueeze(1)
    positive = (valid.unsqueeze(-1) & ~is_target.unsqueeze(1) & (margins > 0)).to(x.dtype)
    slopes = positive.sum(1).scatter_add(1, torch.where(valid, target, 0), -positive.sum(2))
    losses = torch.where(positive > 0, margins, 0).sum((1, 2))
    loss = _Sloped.apply(x, losses / classes, slopes / classes)
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


@decomposes(aten.soft_margin_loss.default)
def soft_margin_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """Torch's own rewriting computes in float32, where the kernel overflows in float16."""
    return _reduced(torch.log1p(torch.exp(-x * target)), reduction)


@decomposes(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    # torch's own decomposition subtracts 1 from a sigmoid, which leaves nothing of small gradients, and hides NaN
    away = (-target * x).exp()
    return _bounded_gradient(grad, -target * away / (1 + away), reduction)
