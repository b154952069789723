"""Powers, logarithms and trigonometric functions."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of
from lightning_ort.compiler.lowering.comparisons import sign_is_negative
from lightning_ort.compiler.lowering.pointwise import operands
from lightning_ort.compiler.lowering.registry import NotLowered, lowers

aten = torch.ops.aten


# ONNX Runtime computes these in float32 only.
_SINGLE = ("Erf", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh")


def _unary(op_type: str) -> Any:
    def lower(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
        return _single(g, op_type, g.operand(x, dtype_of(node)), dtype_of(node))

    return lower


def _single(g: GraphBuilder, op_type: str, value: ir.Value, dtype: torch.dtype) -> ir.Value:
    if dtype == torch.float64 and op_type in _SINGLE:
        raise NotLowered(f"{op_type} of float64 numbers: ONNX Runtime computes it in float32 only")
    return g.op(op_type, value)


for _name, _op in {
    "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "reciprocal": "Reciprocal", "erf": "Erf",
    "sin": "Sin", "asin": "Asin", "acos": "Acos", "atan": "Atan",
    "sinh": "Sinh", "cosh": "Cosh", "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh",
    "tanh": "Tanh", "sigmoid": "Sigmoid",
}.items():  # fmt: skip
    lowers(getattr(aten, _name).default)(_unary(_op))


def _cosine(g: GraphBuilder, value: ir.Value, dtype: torch.dtype) -> ir.Value:
    if dtype == torch.float64:  # no such kernel in ONNX Runtime 1.19
        return g.op("Sin", g.op("Add", value, g.constant(math.pi / 2, dtype)))
    return g.op("Cos", value)


@lowers(aten.cos.default)
def cos(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    return _cosine(g, g.operand(x, dtype_of(node)), dtype_of(node))


@lowers(aten.tan.default)
def tan(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    dtype = dtype_of(node)
    value = g.operand(x, dtype)
    if dtype == torch.float64:
        return g.op("Div", g.op("Sin", value), _cosine(g, value, dtype))
    return g.op("Tan", value)


@lowers(aten.rsqrt.default)
def rsqrt(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    return g.op("Reciprocal", g.op("Sqrt", g.operand(x, dtype_of(node))))


@lowers(aten.log2.default)
def log2(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    dtype = dtype_of(node)
    return g.op("Mul", g.op("Log", g.operand(x, dtype)), g.constant(1 / math.log(2), dtype))


@lowers(aten.log10.default)
def log10(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    dtype = dtype_of(node)
    return g.op("Mul", g.op("Log", g.operand(x, dtype)), g.constant(1 / math.log(10), dtype))


@lowers(aten.exp2.default)
def exp2(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    dtype = dtype_of(node)
    return g.op("Exp", g.op("Mul", g.operand(x, dtype), g.constant(math.log(2), dtype)))


@lowers(aten.log1p.default)
def log1p(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    """log(u) + (x - (u - 1)) / u with u = 1 + x: what rounding took from x in u is added to first order."""
    dtype = dtype_of(node)
    value, one = g.operand(x, dtype), g.constant(1, dtype)
    u = g.op("Add", value, one)
    logarithm, divisor = g.op("Log", u), u
    if not _is_exponential_of_negative(x):
        # at -1 and at infinity there is nothing to add
        value = g.op("Min", value, g.constant(1e30, dtype))
        u = g.op("Add", value, one)
        divisor = g.op("Max", u, g.constant(1e-30, dtype))
    lost = g.op("Sub", value, g.op("Sub", u, one))
    return g.op("Add", logarithm, g.op("Div", lost, divisor))


def _is_exponential_of_negative(x: fx.Node) -> bool:
    """Whether ``x`` is exp(-abs(...)), which lies between 0 and 1."""
    for target in (aten.exp.default, aten.neg.default, aten.abs.default):
        if x.target is not target:
            return False
        x = x.args[0]
    return True


@lowers(aten.expm1.default)
def expm1(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    """exp(x) - 1 = 2 sinh(x/2) exp(x/2) = tanh(x/2) (exp(x) + 1), which does not cancel near 0."""
    dtype = dtype_of(node)
    value, one = g.operand(x, dtype), g.constant(1, dtype)
    e = g.op("Exp", value)
    near = g.op("Mul", g.op("Tanh", g.op("Mul", value, g.constant(0.5, dtype))), g.op("Add", e, one))
    small = g.op("Less", g.op("Abs", value), one)
    return g.op("Where", small, near, g.op("Sub", e, one))


@lowers(aten.erfc.default)
def erfc(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    dtype = dtype_of(node)
    return g.op("Sub", g.constant(1, dtype), _single(g, "Erf", g.operand(x, dtype), dtype))


@lowers(aten.atan2.default)
def atan2(g: GraphBuilder, node: fx.Node, a: fx.Node, b: fx.Node) -> ir.Value:
    """The arc tangent of the ratio, moved to the half plane where the point is."""
    dtype = dtype_of(node)
    y, x = operands(g, node, dtype, a, b)
    zero, pi = g.constant(0, dtype), g.constant(math.pi, dtype)
    # At the origin, and for two infinities, only the signs count.
    at_origin = g.op("And", g.op("Equal", y, zero), g.op("Equal", x, zero))
    infinity = g.constant(math.inf, dtype)
    at_corner = g.op("And", *(g.op("Equal", g.op("Abs", v), infinity) for v in (y, x)))
    ratio = g.op("Where", at_origin, zero, g.op("Div", g.op("Abs", y), g.op("Abs", x)))
    angle = _single(g, "Atan", g.op("Where", at_corner, g.constant(1, dtype), ratio), dtype)
    angle = g.op("Where", sign_is_negative(g, x, dtype), g.op("Sub", pi, angle), angle)
    return g.op("Where", sign_is_negative(g, y, dtype), g.op("Neg", angle), angle)


@lowers(aten.ldexp.Tensor)
def ldexp(g: GraphBuilder, node: fx.Node, a: fx.Node, b: fx.Node) -> ir.Value:
    dtype = dtype_of(node)
    x, y = operands(g, node, dtype, a, b)
    return g.op("Mul", x, g.op("Pow", g.constant(2, dtype), y))
