"""Normalization and dropout."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from onnx import TensorProto
from torch import Tensor, nn

from lightning_ort.errors import UnsupportedError
from lightning_ort.onnx_reader.registry import operator
from lightning_ort.runtime.tensors import TORCH

__all__ = ["BatchNormalization", "Dropout"]


@operator("BatchNormalization", state=["input_mean", "input_var"])
class BatchNormalization(nn.Module):
    """With ``training_mode=1`` and in ``train()`` mode: normalizes by the batch and moves the running statistics.

    Before opset 14, which brought that attribute, a node with more than one output is one of training.

    They are ``input * momentum + batch * (1 - momentum)``, with the variance of the population, as the specification
    says. Where they are initializers of the graph that are not trained, they are moved in place.
    """

    def forward(
        self,
        x: Tensor,
        scale: Tensor,
        bias: Tensor,
        input_mean: Tensor,
        input_var: Tensor,
        *,
        epsilon: float = 1e-5,
        momentum: float = 0.9,
        training_mode: int = 0,
        n_outputs: int,
        n_read: int,
        opset: int,
        label: str,
        moved: list[str],
    ) -> Any:
        if n_read > 3:
            raise UnsupportedError(f"{label}: saved statistics (outputs 4 and 5) cannot be read")
        # torch's gradient of rows reads what has been expanded as if it lay in memory entry by entry
        scale, bias = scale.contiguous(), bias.contiguous()
        trains = training_mode if opset >= 14 else n_outputs > 1
        if not (trains and self.training):
            y = _normalized(x, scale, bias, input_mean, input_var, epsilon)
            return (y, input_mean, input_var)[:n_outputs] if n_outputs > 1 else y
        y = F.batch_norm(x, None, None, scale, bias, True, 0.0, epsilon)
        with torch.set_grad_enabled(torch.is_grad_enabled() and n_read > 1):
            axes = [0, *range(2, x.dim())]
            mean = input_mean * momentum + x.mean(axes) * (1 - momentum)
            variance = input_var * momentum + x.var(axes, correction=0) * (1 - momentum)
        for name, running, new in (("input_mean", input_mean, mean), ("input_var", input_var, variance)):
            if name in moved:
                _move(running, new, label)
        return (y, mean, variance)[:n_outputs] if n_outputs > 1 else y


def _normalized(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, epsilon: float) -> Tensor:
    """``x`` normalized by given statistics, which have gradients too."""
    if not (torch.is_grad_enabled() and (mean.requires_grad or variance.requires_grad)):
        return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)
    # torch's own form has no gradients of the statistics; like it, 16-bit numbers are normalized in float32
    dtype = torch.promote_types(x.dtype, torch.float32)
    shape = [-1, *(1 for _ in range(2, x.dim()))]
    scale, bias, mean, variance = (t.to(dtype).reshape(shape) for t in (scale, bias, mean, variance))
    return ((x - mean) * (torch.rsqrt(variance + epsilon) * scale) + bias).to(x.dtype)


def _move(running: Tensor, new: Tensor, label: str) -> None:
    with torch.no_grad():
        try:
            running.copy_(new)
        except RuntimeError as error:  # a copy of a weight, which is no input of a traced graph
            raise UnsupportedError(
                f"{label}: in training mode its running statistics cannot be an initializer that is a weight as well; "
                "give them an initializer of their own"
            ) from error


@operator("Dropout", sizes=["ratio", "training_mode"], random=True)
class Dropout(nn.Module):
    """Drops elements where ``training_mode`` is true and the module is in ``train()`` mode."""

    def forward(
        self, x: Tensor, ratio: Any = None, training_mode: Any = None, *, seed: int | None = None, n_outputs: int
    ) -> Any:
        share = 0.5 if ratio is None else ratio
        if not (training_mode and self.training and share):
            return (x, torch.ones_like(x, dtype=torch.bool)) if n_outputs == 2 else x
        if n_outputs == 1:
            return F.dropout(x, share, True)
        mask = torch.empty_like(x).bernoulli_(1 - share)
        return x * mask / (1 - share), mask.bool()


@operator("InstanceNormalization")
def instance_normalization(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    # by groups of one channel: torch's own form has as many channels as the batch makes, which may be open
    return F.group_norm(x, x.shape[1], scale, bias, epsilon)


@operator("LayerNormalization")
def layer_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    n_outputs: int,
) -> Any:
    axis = axis % x.dim()
    shape = list(x.shape[axis:])
    if list(scale.shape) == shape and (bias is None or list(bias.shape) == shape):
        y = F.layer_norm(x, shape, scale, bias, epsilon)
    else:
        y = F.layer_norm(x, shape, None, None, epsilon) * scale
        y = y if bias is None else y + bias
    if n_outputs == 1:
        return y
    axes = list(range(axis, x.dim()))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = wide.mean(axes, keepdim=True)
    deviation = torch.rsqrt(wide.var(axes, correction=0, keepdim=True) + epsilon)
    stash = torch.bfloat16 if stash_type == TensorProto.BFLOAT16 else wide.dtype
    return (y, mean.to(stash), deviation.to(stash))[:n_outputs]


@operator("RMSNormalization")
def rms_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, TORCH[stash_type]))
    return F.rms_norm(wide, x.shape[axis % x.dim() :], None, epsilon).to(x.dtype) * scale


@operator("GroupNormalization")
def group_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    num_groups: int,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    opset: int,
) -> Tensor:
    """Until opset 20 scale and bias are per group, from 21 on per channel."""
    if opset < 21:
        channels = x.shape[1] // num_groups
        scale, bias = scale.repeat_interleave(channels), bias.repeat_interleave(channels)
    return F.group_norm(x, num_groups, scale, bias, epsilon)


@operator("LRN")
def lrn(x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    before, after = math.floor((size - 1) / 2), math.ceil((size - 1) / 2)
    squares = F.pad(x * x, [0, 0] * (x.dim() - 2) + [before, after])
    total = sum(squares.narrow(1, i, x.shape[1]) for i in range(size))
    return x / (bias + alpha / size * total) ** beta


@operator("LpNormalization")
def lp_normalization(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    norm = torch.linalg.vector_norm(x, p, axis, keepdim=True)
    zero = norm == 0
    return torch.where(zero, torch.zeros_like(x), x / torch.where(zero, 1, norm))


@operator("MeanVarianceNormalization")
def mean_variance_normalization(x: Tensor, *, axes: list[int] | None = None) -> Tensor:
    axes = [0, 2, 3] if axes is None else axes
    return (x - x.mean(axes, keepdim=True)) / (x.std(axes, correction=0, keepdim=True) + 1e-9)
