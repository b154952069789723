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
    return F.nll_loss(x, target.long(), weight, ignore_index=ignore_index, reduction=reduction)


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
    loss = F.nll_loss(log_prob, labels.long(), weights, ignore_index=ignore_index, reduction=reduction)
    return (loss, log_prob) if n_outputs == 2 else loss
