"""Operators that ONNX has, or whose lowering knows a better form than torch's rewriting."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import Tensor

from lightning_ort.compiler.decompositions.registry import IS_TORCH_2_14, composes, decomposes, keeps

aten = torch.ops.aten

keeps(
    aten.threshold_backward.default,
    aten.clamp_min.default, aten.clamp_min.Tensor, aten.clamp_max.default, aten.clamp_max.Tensor,
    aten.logsumexp.default, aten.slice_backward.default, aten.select_backward.default,
    aten.tril.default, aten.triu.default, aten.roll.default,
    aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor,
)  # fmt: skip


@decomposes(aten.angle.default)
def angle(x: Tensor) -> Tensor:
    x = x if x.is_floating_point() else x.to(torch.float32)
    return torch.where(x < 0, math.pi, torch.where(x != x, x, 0.0))


@decomposes(aten.div.Tensor_mode)
def div_mode(x: Tensor, y: Tensor, rounding_mode: str | None = None) -> Tensor:
    """In 16 bits torch rounds the quotient before it is truncated."""
    # an operand may be a number, where another decomposition has asked
    dtypes = {v.dtype if isinstance(v, Tensor) else None for v in (x, y)}
    if rounding_mode != "trunc" or len(dtypes) > 1 or dtypes.isdisjoint((torch.float16, torch.bfloat16)):
        return NotImplemented
    return torch.trunc(x / y)


def _rounded_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Computes in float32 what is given 16 bits, as the kernels do that it stands for.

    Rounded in between, an exponential or a square would be infinite in float16 far below the largest number.
    """

    @functools.wraps(function)
    def rounded_once(*args: Any, **kwargs: Any) -> Any:
        (dtype, *_) = (x.dtype for x in args if isinstance(x, Tensor))
        if dtype.itemsize > 2:
            return function(*args, **kwargs)
        results = function(*(x.to(torch.float32) if isinstance(x, Tensor) else x for x in args), **kwargs)
        return pytree.tree_map(lambda x: x.to(dtype), results)

    return rounded_once


def _step(x: Tensor) -> Tensor:
    """1 where x > 0, else 0."""
    return (x > 0).to(x.dtype)


@decomposes(aten.gelu.default)
@_rounded_once
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return x * _gelu_factor(x, approximate)


def _gelu_factor(x: Tensor, approximate: str) -> Tensor:
    """What x is multiplied by; the backward graph shares it."""
    if approximate == "tanh":
        return (torch.tanh(x * _tanh_slope(x)) + 1) * 0.5
    return (torch.erf(x * math.sqrt(0.5)) + 1) * 0.5


def _tanh_slope(x: Tensor) -> Tensor:
    scale = math.sqrt(2 / math.pi)
    return (x * x) * (0.044715 * scale) + scale


@decomposes(aten.gelu_backward.default)
@_rounded_once
def gelu_backward(grad: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    factor = _gelu_factor(x, approximate)
    if approximate != "tanh":
        density = torch.exp((x * x) * -0.5) * (x * math.sqrt(0.5 / math.pi))
        return grad * (density + factor)
    # with h the factor: h + x h' = h (1 + 2 x (1 - h) u'), where u' is the derivative of the argument of tanh
    scale = math.sqrt(2 / math.pi)
    twice_derivative = (x * x) * (6 * 0.044715 * scale) + 2 * scale
    return grad * (factor * (x * (1 - factor) * twice_derivative + 1))


@decomposes(aten.silu_backward.default)
@_rounded_once
def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return grad * (sigmoid + (x * sigmoid) * (1 - sigmoid))


@decomposes(aten.leaky_relu.default)
def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    if not 0 < negative_slope <= 1:  # 0 times infinity is NaN
        return torch.where(x > 0, x, x * negative_slope)
    return torch.maximum(x, x * negative_slope)


@decomposes(aten.leaky_relu_backward.default)
def leaky_relu_backward(grad: Tensor, x: Tensor, negative_slope: float, self_is_result: bool) -> Tensor:
    if not 0 < negative_slope <= 1:
        return torch.where(x > 0, grad, grad * negative_slope)
    return grad * _step(x).clamp(min=negative_slope)


@decomposes(aten._prelu_kernel.default)
def prelu(x: Tensor, weight: Tensor) -> Tensor:
    return torch.where(x > 0, x, weight * x)


@decomposes(aten._prelu_kernel_backward.default)
def prelu_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    above = x > 0
    return torch.where(above, grad, grad * weight), torch.where(above, 0, grad * x)


@decomposes(aten.elu.default)
@_rounded_once
def elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    growth = torch.exp(x.clamp(max=0) * input_scale) - 1
    return x.clamp(min=0) * scale + growth * (alpha * scale)


@decomposes(aten.elu_backward.default)
@_rounded_once
def elu_backward(grad: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: Tensor) -> Tensor:
    if is_result:
        slope = (x.clamp(max=0) + alpha * scale) * input_scale
    else:
        slope = torch.exp(x.clamp(max=0) * input_scale) * (alpha * scale * input_scale)
    above, jump = scale, scale - alpha * scale * input_scale
    if abs(jump) <= 1e-12 * abs(above):  # the slope is continuous
        return grad * slope
    return grad * (slope + _step(x) * jump)


@decomposes(aten.hardswish_backward.default)
@_rounded_once
def hardswish_backward(grad: Tensor, x: Tensor) -> Tensor:
    slope = x.clamp(-3, 3) * (1 / 3) + 0.5 - (x >= 3).to(x.dtype) * 0.5
    return torch.where(x <= -3, 0, grad * slope)


# Kernels of torch give a number that is none no gradient here; the rewritings of torch would hand it on.


@decomposes(aten.hardtanh_backward.default)
def hardtanh_backward(grad: Tensor, x: Tensor, min_val: float, max_val: float) -> Tensor:
    return torch.where((x > min_val) & (x < max_val), grad, 0)


@composes(aten.softshrink.default, native=True)
def softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    if x.dtype.itemsize < 4 and IS_TORCH_2_14:  # its kernel rounds the bound first
        lambd = float(from_torch_dtype(x.dtype).numpy().type(lambd))
    shrunk = torch.where(x > lambd, x - lambd, x + lambd)
    return torch.where((x < -lambd) | (x > lambd), shrunk, x.detach() * 0)


@composes(aten.hardshrink.default, native=True)
def hardshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    is_outside = (x < -lambd) | (x > lambd)
    return torch.where(is_outside, x, x.detach().masked_fill((x >= -lambd) & (x <= lambd), 0))


def _log1p_exp_minus_abs(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(-x.abs()))


def _is_beyond_precision(x: Tensor, threshold: float) -> bool:
    """Whether softplus(x) and x are the same number from the threshold on."""
    return threshold >= 18 and x.dtype == torch.float32


@decomposes(aten.softplus.default)
@_rounded_once
def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    scaled = x if beta == 1 else x * beta
    smooth = scaled.clamp(min=0) + _log1p_exp_minus_abs(scaled)
    smooth = smooth if beta == 1 else smooth / beta
    return smooth if _is_beyond_precision(x, threshold) else torch.where(scaled > threshold, x, smooth)


def _slope(x: Tensor) -> Tensor:
    """The sigmoid of ``x``, to the last digit also where it is tiny: ONNX Runtime's own is only as exact as 1 is."""
    return torch.reciprocal(1 + torch.exp(-x))


@decomposes(aten.softplus_backward.default)
@_rounded_once
def softplus_backward(grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    scaled = x if beta == 1 else x * beta
    smooth = grad * _slope(scaled)
    return smooth if _is_beyond_precision(x, threshold) else torch.where(scaled > threshold, grad, smooth)


@decomposes(aten.log_sigmoid_forward.default)
@_rounded_once
def log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.clamp(max=0) - _log1p_exp_minus_abs(x), x.new_zeros(0)


@decomposes(aten.log_sigmoid_backward.default)
@_rounded_once
def log_sigmoid_backward(grad: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    return grad * _slope(-x)


def _tanh_of_softplus(x: Tensor) -> Tensor:
    """n / (n + 2) with n = e^x (e^x + 2); beyond 20 it is 1 and the exponential could overflow."""
    growth = torch.exp(x.clamp(max=20))
    numerator = growth * (growth + 2)
    return numerator / (numerator + 2)


@decomposes(aten.mish.default)
@_rounded_once
def mish(x: Tensor) -> Tensor:
    return x * _tanh_of_softplus(x)


@decomposes(aten.mish_backward.default)
@_rounded_once
def mish_backward(grad: Tensor, x: Tensor) -> Tensor:
    y = _tanh_of_softplus(x)
    return grad * (y + (x * torch.sigmoid(x)) * (1 - y * y))
