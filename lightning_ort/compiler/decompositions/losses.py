"""Losses whose rewriting in torch is wrong, or not the cheapest in ONNX."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ort.compiler.decompositions.composites import composes
from lightning_ort.compiler.decompositions.registry import keeps

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
