"""Powers, logarithms and trigonometric functions."""

from __future__ import annotations

import enum
import math
import operator
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of
from lightning_ort.compiler.lowering.comparisons import sign_is_negative
from lightning_ort.compiler.lowering.elementwise import exponential, operands, square_root
from lightning_ort.compiler.lowering.registry import NotLowered, lowers
from lightning_ort.runtime.providers.cpu import gives

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
    "log": "Log", "reciprocal": "Reciprocal",
    "sin": "Sin", "asin": "Asin", "acos": "Acos", "atan": "Atan",
    "sinh": "Sinh", "cosh": "Cosh", "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh",
}.items():  # fmt: skip
    lowers(getattr(aten, _name).default)(_unary(_op))


# -- functions between bounds: could anybody notice a result that lies outside by a rounding? ------------------------

_BLURRING = {
    aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.convolution, aten.convolution_backward, aten.sum, aten.mean,
    aten.exp, aten.tanh, aten.sigmoid, aten.erf, aten.sin, aten.cos, aten._softmax, aten._log_softmax,
    aten.native_layer_norm, aten.native_group_norm, aten.native_batch_norm, aten._native_batch_norm_legit_functional,
}  # fmt: skip
"""What reads numbers to no more digits than they have: a sum has lost the bound, and these are smooth everywhere."""

_CARRYING = {
    aten.mul, aten.add, aten.sub, aten.rsub, aten.neg, aten.abs, aten.square, aten.relu, aten.view, aten.reshape,
    aten._unsafe_view, aten.permute, aten.transpose, aten.t, aten.expand, aten.squeeze, aten.unsqueeze, aten.select,
    aten.slice, aten.cat, aten.stack, aten.split, aten.split_with_sizes, aten.clone, aten.alias, aten.flip,
}  # fmt: skip
"""What may lead to 1 - x², which is not below zero where x has kept its bounds."""

_MOST = 60
"""nodes that are looked at"""


class _Reader(enum.Enum):
    """Of how near a number comes to a bound."""

    NOBODY = "nobody"
    OUTSIDE = "whoever gets the results"
    FUNCTION = "a function in the graph"


def _nearness_read(node: fx.Node) -> _Reader:
    """Who reads how near ``node`` comes to its bounds, which rounding may exceed by a unit in the last place.

    A logarithm, a root, an arc cosine or a comparison does, also of what was computed from it.
    """
    seen, waiting, reader = {node}, [node], _Reader.NOBODY
    while waiting:
        for user in waiting.pop().users:
            packet = getattr(user.target, "overloadpacket", None)
            if packet in _BLURRING or user in seen:
                continue
            if user.op == "output":
                reader = _Reader.OUTSIDE
                continue
            is_power = packet is aten.pow and isinstance(user.args[1], int) and user.args[1] >= 0
            if (packet not in _CARRYING and not is_power and user.target is not operator.getitem) or len(seen) > _MOST:
                return _Reader.FUNCTION
            seen.add(user)
            waiting.append(user)
    return reader


@lowers(aten.tanh.default)
def tanh(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    """Tanh, which in float32 is off by five units in the last place, and 1.0000002 for some numbers below 9."""
    dtype = dtype_of(node)
    value = g.operand(x, dtype)
    result = g.op("Tanh", value)
    reader = _Reader.NOBODY if dtype == torch.float64 else _nearness_read(node)
    if reader is _Reader.OUTSIDE:
        return g.op("Clip", result, g.constant(-1, dtype), g.constant(1, dtype))
    if reader is _Reader.NOBODY:
        return result
    one, size = g.constant(1, dtype), g.op("Abs", value)
    power = g.op("Exp", g.op("Mul", size, g.constant(-2, dtype)))
    large = g.op("Div", g.op("Sub", one, power), g.op("Add", one, power))
    large = g.where(g.op("Less", value, g.constant(0, dtype)), g.op("Neg", large), large, dtype)
    return g.where(g.op("Less", size, g.constant(_SMALL_TANH, dtype)), result, large, dtype)


_SMALL_TANH = 0.35
"""below which 1 - exp(-2x) has lost digits"""


# Their results reach sums and products, where the absolute error counts.
_ABSOLUTE = {aten.mul.Tensor, aten.mul.Scalar, aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar}
# Of these it is the sign of a tiny number that counts, or its digits.
_RELATIVE = {
    aten.floor, aten.ceil, aten.sign, aten.sgn, aten.signbit, aten.copysign, aten.heaviside, aten.div, aten.remainder,
    aten.floor_divide, aten.fmod, aten.log, aten.log2, aten.log10, aten.reciprocal, aten.rsqrt, aten.eq, aten.ne,
    aten.lt, aten.le, aten.gt, aten.ge, aten.nonzero, aten.logical_not, aten.argmax, aten.argmin, aten.topk, aten.sort,
}  # fmt: skip


def _counts_absolutely(user: fx.Node, node: fx.Node) -> bool:
    """Whether ``user`` does not care for the digits of a tiny ``node``, as the difference from a label of 0 does."""
    if user.target not in _ABSOLUTE or (user.target is aten.sub.Tensor and user.args[0] is node):
        return False
    return not any(getattr(after.target, "overloadpacket", None) in _RELATIVE for after in user.users)


@lowers(aten.sigmoid.default)
def sigmoid(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    """Sigmoid, which is 0 below -18, and 1.0000001 for some numbers below 18.

    What is more than added and multiplied, as before a logarithm or, taken from 1, before a root, is computed by exp.
    """
    dtype = dtype_of(node)
    value = g.operand(x, dtype)
    absolute = dtype != torch.float64 and all(_counts_absolutely(user, node) for user in node.users)
    if absolute and _nearness_read(node) is _Reader.NOBODY:
        return g.op("Sigmoid", value)
    return g.op("Reciprocal", g.op("Add", g.op("Exp", g.op("Neg", value)), g.constant(1, dtype)))


@lowers(aten.exp.default)
def exp(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    return exponential(g, g.operand(x, dtype_of(node)), dtype_of(node))


@lowers(aten.sqrt.default)
def sqrt(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    return square_root(g, g.operand(x, dtype_of(node)), dtype_of(node))


def _error_function(g: GraphBuilder, value: ir.Value, dtype: torch.dtype) -> ir.Value:
    result = _single(g, "Erf", value, dtype)
    if gives("Erf", math.nan, math.nan):
        return result
    return g.where(g.op("IsNaN", value), value, result, dtype)


@lowers(aten.erf.default)
def erf(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    dtype = dtype_of(node)
    if all(_is_gelu_factor(user, x) for user in node.users):  # NaN gets into the product anyway
        return _single(g, "Erf", g.operand(x, dtype), dtype)
    return _error_function(g, g.operand(x, dtype), dtype)


def _is_gelu_factor(successor: fx.Node, argument: fx.Node) -> bool:
    """Whether ``erf(argument) + 1`` is halved, and then nothing but multiplied by, or added to, what has the input."""
    if successor.target is not aten.add.Tensor or successor.args[1] != 1 or argument.target is not aten.mul.Tensor:
        return False
    x = argument.args[0]
    halves = list(successor.users)
    if any(h.target is not aten.mul.Tensor or h.args[1] != 0.5 for h in halves):
        return False
    ends = [end for h in halves for end in h.users]
    return all(
        (end.target is aten.mul.Tensor and x in end.args)
        or (end.target is aten.add.Tensor and end.args[1] in halves and _has_factor(end.args[0], x))
        for end in ends
    )


def _has_factor(product: Any, x: Any) -> bool:
    if not isinstance(product, fx.Node) or product.target is not aten.mul.Tensor:
        return False
    return x in product.args or any(_has_factor(a, x) for a in product.args)


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
    return g.op("Reciprocal", square_root(g, g.operand(x, dtype_of(node)), dtype_of(node)))


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
    return exponential(g, g.op("Mul", g.operand(x, dtype), g.constant(math.log(2), dtype)), dtype)


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
    return g.where(small, near, g.op("Sub", e, one), dtype)


@lowers(aten.erfc.default)
def erfc(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    """1 - erf(x), and beyond 0.5, where that would cancel the digits, a fit of its own.

    t exp(-x**2 + P(t)) with t = 1 / (1 + x / 2) is within 1.2e-7 of the value (Press et al., Numerical Recipes,
    6.2.2). The square is taken apart, so that its rounding is not magnified: (x - h)(x + h) + h**2 with h a multiple
    of 1/16, of which the square is exact.
    """
    dtype = dtype_of(node)
    value = g.operand(x, dtype)

    def number(value: float) -> ir.Value:
        return g.constant(value, dtype)

    near = g.op("Sub", number(1), _error_function(g, value, dtype))
    far = g.where(g.op("Greater", value, number(15)), number(15), value, dtype)  # where it is 0; infinity less itself
    rough = g.op("Div", g.op("Round", g.op("Mul", far, number(16))), number(16))
    t = g.op("Div", number(1), g.op("Add", g.op("Mul", far, number(0.5)), number(1)))
    fit = number(_ERFC[-1])
    for coefficient in reversed(_ERFC[:-1]):
        fit = g.op("Add", g.op("Mul", fit, t), number(coefficient))
    rest = g.op("Mul", g.op("Sub", rough, far), g.op("Add", rough, far))
    tail = g.op("Exp", g.op("Neg", g.op("Mul", rough, rough)))
    tail = g.op("Mul", g.op("Mul", t, tail), g.op("Exp", g.op("Add", rest, fit)))
    return g.where(g.op("Greater", value, number(0.5)), tail, near, dtype)


_ERFC = (
    -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587, -0.82215223,
    0.17087277,
)  # fmt: skip
"""Coefficients of P, from the constant one up."""


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
    ratio = g.where(at_origin, zero, g.op("Div", g.op("Abs", y), g.op("Abs", x)), dtype)
    angle = _single(g, "Atan", g.where(at_corner, g.constant(1, dtype), ratio, dtype), dtype)
    angle = g.where(sign_is_negative(g, x, dtype, b), g.op("Sub", pi, angle), angle, dtype)
    return g.where(sign_is_negative(g, y, dtype, a), g.op("Neg", angle), angle, dtype)


@lowers(aten.ldexp.Tensor)
def ldexp(g: GraphBuilder, node: fx.Node, a: fx.Node, b: fx.Node) -> ir.Value:
    dtype = dtype_of(node)
    x, y = operands(g, node, dtype, a, b)
    return g.op("Mul", x, g.op("Pow", g.constant(2, dtype), y))
