"""Losses of classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ort.onnx_reader.registry import operator

__all__: list[str] = []

_NO_CLASS = -100
"""what torch ignores by default; no class has this number"""


@operator("NegativeLogLikelihoodLoss", constants=["weight"])
def negative_log_likelihood_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = _NO_CLASS,
    reduction: str = "mean",
) -> Tensor:
    return _nll(x, target.long(), weight, ignore_index, reduction)


@operator("SoftmaxCrossEntropyLoss", constants=["weights"])
def softmax_cross_entropy_loss(
    scores: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    ignore_index: int = _NO_CLASS,
    reduction: str = "mean",
    n_outputs: int,
) -> Tensor | tuple[Tensor, Tensor]:
    log_prob = torch.log_softmax(scores, 1)
    loss = _nll(log_prob, labels.long(), weights, ignore_index, reduction)
    return (loss, log_prob) if n_outputs == 2 else loss


def _nll(log_prob: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    """The loss, which has a gradient by the class weights too."""
    if weight is None or not (torch.is_grad_enabled() and weight.requires_grad):
        return F.nll_loss(log_prob, target, weight, ignore_index=ignore_index, reduction=reduction)
    # torch's own form has no gradient of the weights
    ignored = target == ignore_index
    label = target.masked_fill(ignored, 0)
    share = weight[label].masked_fill(ignored, 0)
    loss = -log_prob.gather(1, label.unsqueeze(1)).squeeze(1).masked_fill(ignored, 0) * share
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / share.sum()
