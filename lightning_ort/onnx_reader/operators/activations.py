"""Activation functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ort.onnx_reader.registry import CONTRIB, operator

__all__: list[str] = []


@operator("Relu")
def relu(x: Tensor) -> Tensor:
    return F.relu(x)


@operator("Sigmoid")
def sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x)


@operator("Tanh")
def tanh(x: Tensor) -> Tensor:
    return torch.tanh(x)


@operator("Softplus")
def softplus(x: Tensor) -> Tensor:
    return F.softplus(x)


@operator("Softsign")
def softsign(x: Tensor) -> Tensor:
    return F.softsign(x)


@operator("Mish")
def mish(x: Tensor) -> Tensor:
    return F.mish(x)


@operator("Swish")
def swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.silu(x) if alpha == 1 else x * torch.sigmoid(alpha * x)


@operator("HardSwish")
def hard_swish(x: Tensor) -> Tensor:
    return F.hardswish(x)


@operator("HardSigmoid")
def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    if abs(alpha - 1 / 6) < 1e-7 and beta == 0.5:
        return F.hardsigmoid(x)
    return torch.clamp(x * alpha + beta, 0, 1)


@operator("LeakyRelu")
def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    return F.leaky_relu(x, alpha)


@operator("ThresholdedRelu")
def thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return torch.where(x > alpha, x, 0.0)


@operator("Elu")
def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.elu(x, alpha)


@operator("Celu")
def celu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.celu(x, alpha)


@operator("Selu")
def selu(x: Tensor, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Tensor:
    return gamma * F.elu(x, alpha)


@operator("PRelu")
def prelu(x: Tensor, slope: Tensor) -> Tensor:
    """The slope is broadcast to ``x`` from the right, as in numpy."""
    return torch.where(x > 0, x, x * slope)


@operator("Gelu")
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


@operator("Gelu", domain=CONTRIB)
def contrib_gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


@operator("FastGelu", domain=CONTRIB)
def fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


@operator("QuickGelu", domain=CONTRIB)
def quick_gelu(x: Tensor, *, alpha: float = 1.702) -> Tensor:
    return x * torch.sigmoid(alpha * x)


@operator("Shrink")
def shrink(x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, torch.zeros_like(x)))


@operator("Softmax")
def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return torch.softmax(x, axis)


@operator("LogSoftmax")
def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return torch.log_softmax(x, axis)


@operator("Hardmax")
def hardmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1.0)
