"""Arithmetic, comparisons, logic, rounding and conversions, element by element."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_ort.onnx_reader.registry import operator
from lightning_ort.onnx_reader.shape_arithmetic import as_tensor

__all__: list[str] = []

Operand = Any
"""a tensor or a Python number"""

# the values are Any: torch's functions have no common type
_UNARY: dict[str, Any] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh,
    "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "IsNaN": torch.isnan, "Log": torch.log,
    "Neg": torch.neg, "Not": torch.logical_not, "Reciprocal": torch.reciprocal, "Round": torch.round,
    "Sign": torch.sign, "Sin": torch.sin, "Sinh": torch.sinh, "Sqrt": torch.sqrt, "Tan": torch.tan,
    "BitwiseNot": torch.bitwise_not,
}  # fmt: skip

_BINARY: dict[str, Any] = {
    "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor, "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor,
}  # fmt: skip

# with the same for exchanged operands: torch wants a tensor first
_ORDERED: dict[str, tuple[Any, Any]] = {
    "Add": (torch.add, torch.add), "Mul": (torch.mul, torch.mul), "Equal": (torch.eq, torch.eq),
    "Greater": (torch.gt, torch.lt), "GreaterOrEqual": (torch.ge, torch.le), "Less": (torch.lt, torch.gt),
    "LessOrEqual": (torch.le, torch.ge),
}  # fmt: skip

_FOLDED: dict[str, Any] = {"Max": torch.maximum, "Min": torch.minimum, "Sum": torch.add}


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def compute(x: Tensor) -> Tensor:
        return function(x)

    return compute


def _binary(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def compute(a: Tensor, b: Tensor) -> Tensor:
        return function(a, b)

    return compute


def _ordered(function: Callable[..., Tensor], exchanged: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def compute(a: Operand, b: Operand) -> Tensor:
        return function(a, b) if isinstance(a, Tensor) else exchanged(b, a)

    return compute


def _folded(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def compute(*tensors: Tensor) -> Tensor:
        return functools.reduce(function, tensors)

    return compute


for _name, _function in _UNARY.items():
    operator(_name)(_unary(_function))
for _name, _function in _BINARY.items():
    operator(_name)(_binary(_function))
for _name, _pair in _ORDERED.items():
    operator(_name, numbers=True)(_ordered(*_pair))
for _name, _function in _FOLDED.items():
    operator(_name)(_folded(_function))


@operator("Sub", numbers=True)
def subtract(a: Operand, b: Operand) -> Tensor:
    return a - b


def _first(a: Operand, b: Operand) -> Tensor:
    """``a`` as the tensor that some of torch's functions want before a tensor ``b``."""
    return a if isinstance(a, Tensor) else as_tensor(a, b.dtype, b)


@operator("Div", numbers=True)
def div(a: Operand, b: Operand) -> Tensor:
    tensor = a if isinstance(a, Tensor) else b
    if tensor.is_floating_point():
        return a / b
    return torch.div(_first(a, b), b, rounding_mode="trunc")


@operator("Mod", numbers=True)
def mod(a: Operand, b: Operand, *, fmod: int = 0) -> Tensor:
    return torch.fmod(_first(a, b), b) if fmod else torch.remainder(_first(a, b), b)


@operator("Pow", numbers=True)
def pow_(x: Tensor, y: Operand) -> Tensor:
    """The result is of the type of ``x``; powers of whole numbers by floats are computed in float64."""
    if not isinstance(y, Tensor):
        return torch.pow(x, y).to(x.dtype)
    wide = torch.promote_types(x.dtype, y.dtype)
    if wide.is_floating_point and not x.is_floating_point():
        wide = torch.float64
    return torch.pow(x.to(wide), y.to(wide)).to(x.dtype)


@operator("BitShift")
def bit_shift(x: Tensor, y: Tensor, *, direction: str) -> Tensor:
    return x << y if direction == "LEFT" else x >> y


@operator("IsInf")
def is_inf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    found = torch.zeros_like(x, dtype=torch.bool)
    if detect_positive:
        found = found | (x == float("inf"))
    if detect_negative:
        found = found | (x == float("-inf"))
    return found


@operator("Where", numbers=True)
def where(condition: Tensor, x: Operand, y: Operand) -> Tensor:
    return torch.where(condition, x, y)


@operator("Clip", constants=["minimum", "maximum"])
def clip(x: Tensor, minimum: Tensor | None = None, maximum: Tensor | None = None) -> Tensor:
    return x if minimum is None and maximum is None else torch.clamp(x, minimum, maximum)


@operator("Mean")
def mean(*tensors: Tensor) -> Tensor:
    return _folded(torch.add)(*tensors) / len(tensors)


@operator("Cast")
def cast(x: Tensor, *, to: torch.dtype, saturate: int = 1) -> Tensor:
    return x.to(to)


@operator("CastLike")
def cast_like(x: Tensor, target: Tensor, *, saturate: int = 1) -> Tensor:
    return x.to(target.dtype)
