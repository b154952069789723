"""Element-wise arithmetic, comparisons and activations."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of
from lightning_ort.compiler.lowering.registry import NotLowered, lowers

aten = torch.ops.aten

SMALL_INTEGERS = (torch.int8, torch.int16, torch.uint8)


def common_dtype(*args: Any) -> torch.dtype:
    """The type torch computes in when ``args`` (fx nodes and Python numbers) meet in one element-wise call."""
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
    plain = [
        v if isinstance(v, (torch.Tensor, bool, int, float)) else 1 if isinstance(v, torch.SymInt) else 1.0
        for v in values
    ]
    dtype = torch.result_type(plain[0], plain[0])
    result = plain[0]
    for other in plain[1:]:
        dtype = torch.result_type(result, other)
        tensors = [v for v in (result, other) if isinstance(v, torch.Tensor)]
        rank = max((v.dim() for v in tensors), default=0)
        result = torch.empty((1,) * rank, dtype=dtype, device="meta") if tensors else torch.empty((), dtype=dtype)
    return dtype


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in: ONNX Runtime lacks arithmetic on the smallest integers."""
    return torch.int32 if dtype in SMALL_INTEGERS else dtype


def _binary(op_type: str) -> Any:
    def lower(g: GraphBuilder, node: fx.Node, a: Any, b: Any, *, alpha: Any = 1) -> ir.Value:
        out = dtype_of(node)
        dtype = computing_dtype(out)
        x, y = g.operand(a, dtype), g.operand(b, dtype)
        if alpha != 1:
            y = g.op("Mul", y, g.operand(alpha, dtype))
        if out == torch.bool:
            if op_type not in ("Add", "Mul"):
                raise NotLowered(f"{op_type} of bool tensors")
            return g.op("Or" if op_type == "Add" else "And", x, y)
        return g.cast(g.op(op_type, x, y), dtype, out)

    return lower


lowers(aten.add.Tensor, aten.add.Scalar)(_binary("Add"))
lowers(aten.sub.Tensor, aten.sub.Scalar)(_binary("Sub"))
lowers(aten.mul.Tensor, aten.mul.Scalar)(_binary("Mul"))


@lowers(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(g: GraphBuilder, node: fx.Node, a: Any, b: Any, alpha: Any = 1) -> ir.Value:
    return _binary("Sub")(g, node, b, a, alpha=alpha)


@lowers(aten.div.Tensor, aten.div.Scalar)
def div(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
    dtype = dtype_of(node)
    return g.op("Div", g.operand(a, dtype), g.operand(b, dtype))


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(g: GraphBuilder, node: fx.Node, a: Any, b: Any, rounding_mode: str | None = None) -> ir.Value:
    dtype = dtype_of(node)
    if rounding_mode is None:
        return div(g, node, a, b)
    if dtype.is_floating_point:
        quotient = g.op("Div", g.operand(a, dtype), g.operand(b, dtype))
        if rounding_mode == "floor":
            return g.op("Floor", quotient)
        return g.op("Mul", g.op("Sign", quotient), g.op("Floor", g.op("Abs", quotient)))
    wide = computing_dtype(dtype)
    x, y = g.operand(a, wide), g.operand(b, wide)
    if rounding_mode == "floor":
        x = g.op("Sub", x, g.op("Mod", x, y))
    return g.cast(g.op("Div", x, y), wide, dtype)


@lowers(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
    return div_mode(g, node, a, b, rounding_mode="floor")


@lowers(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
    dtype = dtype_of(node)
    if dtype.is_floating_point:
        x, y = g.operand(a, dtype), g.operand(b, dtype)
        return g.op("Sub", x, g.op("Mul", y, g.op("Floor", g.op("Div", x, y))))
    wide = computing_dtype(dtype)
    return g.cast(g.op("Mod", g.operand(a, wide), g.operand(b, wide)), wide, dtype)


@lowers(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
    wide = computing_dtype(dtype_of(node))
    return g.cast(g.op("Mod", g.operand(a, wide), g.operand(b, wide), fmod=1), wide, dtype_of(node))


@lowers(aten.pow.Tensor_Scalar)
def pow_scalar(g: GraphBuilder, node: fx.Node, a: fx.Node, exponent: Any) -> ir.Value:
    dtype = dtype_of(node)
    x = g.operand(a, dtype)
    if exponent == 2:
        return g.op("Mul", x, x)
    if exponent == 1:
        return x
    if exponent == 3:
        return g.op("Mul", g.op("Mul", x, x), x)
    if dtype.is_floating_point and exponent == 0.5:
        return g.op("Sqrt", x)
    if dtype.is_floating_point and exponent == -1:
        return g.op("Reciprocal", x)
    if dtype.is_floating_point and exponent == -0.5:
        return g.op("Reciprocal", g.op("Sqrt", x))
    return g.op("Pow", x, g.operand(exponent, dtype))


@lowers(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
    dtype = dtype_of(node)
    return g.op("Pow", g.operand(a, dtype), g.operand(b, dtype))


def _extremum(op_type: str) -> Any:
    def lower(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
        out = dtype_of(node)
        dtype = computing_dtype(out if out != torch.bool else torch.int32)
        return g.cast(g.op(op_type, g.operand(a, dtype), g.operand(b, dtype)), dtype, out)

    return lower


lowers(aten.maximum.default)(_extremum("Max"))
lowers(aten.minimum.default)(_extremum("Min"))


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(g: GraphBuilder, node: fx.Node, x: fx.Node, min: Any = None, max: Any = None) -> ir.Value:
    out = dtype_of(node)
    dtype = computing_dtype(out)
    value = g.operand(x, dtype)
    if min is not None:
        value = g.op("Max", value, g.operand(min, dtype))
    if max is not None:
        value = g.op("Min", value, g.operand(max, dtype))
    return g.cast(value, dtype, out)


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(g: GraphBuilder, node: fx.Node, x: fx.Node, min: Any) -> ir.Value:
    return clamp(g, node, x, min=min)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(g: GraphBuilder, node: fx.Node, x: fx.Node, max: Any) -> ir.Value:
    return clamp(g, node, x, max=max)


def _comparison(op_type: str, negate: bool = False) -> Any:
    def lower(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
        dtype = computing_dtype(common_dtype(a, b))
        if dtype == torch.bool and op_type != "Equal":
            dtype = torch.int32
        result = g.op(op_type, g.operand(a, dtype), g.operand(b, dtype))
        return g.op("Not", result) if negate else result

    return lower


for _name, _op, _negate in (
    ("eq", "Equal", False),
    ("ne", "Equal", True),
    ("gt", "Greater", False),
    ("ge", "GreaterOrEqual", False),
    ("lt", "Less", False),
    ("le", "LessOrEqual", False),
):
    _packet = getattr(aten, _name)
    lowers(_packet.Tensor, _packet.Scalar)(_comparison(_op, _negate))


def _unary(op_type: str) -> Any:
    def lower(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
        return g.op(op_type, g.operand(x, dtype_of(node)))

    return lower


for _name, _op in {
    "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "reciprocal": "Reciprocal", "erf": "Erf",
    "sin": "Sin", "cos": "Cos", "tan": "Tan", "asin": "Asin", "acos": "Acos", "atan": "Atan",
    "sinh": "Sinh", "cosh": "Cosh", "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh",
    "tanh": "Tanh", "sigmoid": "Sigmoid", "relu": "Relu",
}.items():  # fmt: skip
    lowers(getattr(aten, _name).default)(_unary(_op))


def _unary_any(op_type: str) -> Any:
    """Operators that integers have too, some only in wider types."""

    def lower(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
        out = dtype_of(node)
        dtype = computing_dtype(out)
        if op_type in ("Floor", "Ceil", "Round", "Identity") and not out.is_floating_point:
            return g.value(x)
        return g.cast(g.op(op_type, g.operand(x, dtype)), dtype, out)

    return lower


for _name, _op in {
    "abs": "Abs", "neg": "Neg", "sign": "Sign", "floor": "Floor", "ceil": "Ceil", "round": "Round",
}.items():  # fmt: skip
    lowers(getattr(aten, _name).default)(_unary_any(_op))


@lowers(aten.sgn.default)
def sgn(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    return _unary_any("Sign")(g, node, x)


@lowers(aten.trunc.default)
def trunc(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    if not dtype_of(node).is_floating_point:
        return g.value(x)
    return g.op("Mul", g.op("Sign", g.value(x)), g.op("Floor", g.op("Abs", g.value(x))))


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
    """log(1+x) without cancellation near 0: log(u) * x / (u - 1) with u = 1 + x (Kahan)."""
    dtype = dtype_of(node)
    value, one = g.operand(x, dtype), g.constant(1, dtype)
    u = g.op("Add", value, one)
    difference = g.op("Sub", u, one)
    exact = g.op("Equal", difference, g.constant(0, dtype))
    safe = g.op("Where", exact, one, difference)
    corrected = g.op("Div", g.op("Mul", g.op("Log", u), value), safe)
    infinite = g.op("IsInf", value) if dtype == torch.float32 else g.op("Equal", value, g.constant(math.inf, dtype))
    return g.op("Where", exact, value, g.op("Where", infinite, g.op("Log", u), corrected))


@lowers(aten.expm1.default)
def expm1(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    """exp(x) - 1 = 2 sinh(x/2) exp(x/2) = tanh(x/2) (exp(x) + 1), which does not cancel near 0."""
    dtype = dtype_of(node)
    value, one = g.operand(x, dtype), g.constant(1, dtype)
    e = g.op("Exp", value)
    near = g.op("Mul", g.op("Tanh", g.op("Mul", value, g.constant(0.5, dtype))), g.op("Add", e, one))
    small = g.op("Less", g.op("Abs", value), one)
    return g.op("Where", small, near, g.op("Sub", e, one))


@lowers(aten.logical_not.default)
def logical_not(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    return g.op("Not", g.operand(x, torch.bool))


def _logical(op_type: str) -> Any:
    def lower(g: GraphBuilder, node: fx.Node, a: fx.Node, b: fx.Node) -> ir.Value:
        return g.op(op_type, g.operand(a, torch.bool), g.operand(b, torch.bool))

    return lower


lowers(aten.logical_and.default)(_logical("And"))
lowers(aten.logical_or.default)(_logical("Or"))
lowers(aten.logical_xor.default)(_logical("Xor"))


def _bitwise(logical: str, integer: str) -> Any:
    def lower(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
        dtype = dtype_of(node)
        return g.op(logical if dtype == torch.bool else integer, g.operand(a, dtype), g.operand(b, dtype))

    return lower


for _name, _logical_op, _integer_op in (
    ("bitwise_and", "And", "BitwiseAnd"),
    ("bitwise_or", "Or", "BitwiseOr"),
    ("bitwise_xor", "Xor", "BitwiseXor"),
):
    _packet = getattr(aten, _name)
    lowers(_packet.Tensor, _packet.Scalar)(_bitwise(_logical_op, _integer_op))


@lowers(aten.bitwise_not.default)
def bitwise_not(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    return g.op("Not" if dtype_of(node) == torch.bool else "BitwiseNot", g.value(x))


@lowers(aten.isnan.default)
def isnan(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    if not dtype_of(x).is_floating_point:
        return g.op("Expand", g.constant(False, torch.bool), g.shape(x))
    return g.op("IsNaN", g.value(x))


@lowers(aten.isinf.default)
def isinf(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    if not dtype_of(x).is_floating_point:
        return g.op("Expand", g.constant(False, torch.bool), g.shape(x))
    return g.op("Equal", g.op("Abs", g.value(x)), g.constant(math.inf, dtype_of(x)))


@lowers(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(g: GraphBuilder, node: fx.Node, condition: fx.Node, a: Any, b: Any) -> ir.Value:
    out = dtype_of(node)
    dtype = torch.int32 if out in (torch.int8, torch.int16, torch.bool) else out
    chosen = g.op("Where", g.operand(condition, torch.bool), g.operand(a, dtype), g.operand(b, dtype))
    return g.cast(chosen, dtype, out)


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(g: GraphBuilder, node: fx.Node, x: fx.Node, mask: fx.Node, value: Any) -> ir.Value:
    return where(g, node, mask, value, x)


@lowers(aten.gelu.default)
def gelu(g: GraphBuilder, node: fx.Node, x: fx.Node, approximate: str = "none") -> ir.Value:
    if dtype_of(node) == torch.float32:
        return g.op("Gelu", g.value(x), approximate=approximate)
    dtype = dtype_of(node)
    value = g.operand(x, dtype)
    half = g.op("Mul", value, g.constant(0.5, dtype))
    if approximate == "tanh":
        cube = g.op("Mul", g.op("Mul", g.op("Mul", value, value), value), g.constant(0.044715, dtype))
        inner = g.op("Tanh", g.op("Mul", g.op("Add", value, cube), g.constant(math.sqrt(2 / math.pi), dtype)))
    else:
        inner = g.op("Erf", g.op("Mul", value, g.constant(math.sqrt(0.5), dtype)))
    return g.op("Mul", half, g.op("Add", inner, g.constant(1, dtype)))


@lowers(aten.leaky_relu.default)
def leaky_relu(g: GraphBuilder, node: fx.Node, x: fx.Node, negative_slope: float = 0.01) -> ir.Value:
    return g.op("LeakyRelu", g.operand(x, dtype_of(node)), alpha=float(negative_slope))


@lowers(aten._to_copy.default)
def to_copy(g: GraphBuilder, node: fx.Node, x: fx.Node, **kwargs: Any) -> ir.Value:
    """Conversion of the element type; where the tensor lives is settled before lowering."""
    source, target = dtype_of(x), dtype_of(node)
    if source.is_floating_point and target in (torch.uint8, torch.int8, torch.int16):
        # torch goes through a wide integer and wraps; ONNX leaves out-of-range conversions undefined
        return g.cast(g.cast(g.value(x), source, torch.int64), torch.int64, target)
    return g.cast(g.value(x), source, target)


@lowers(aten.alias.default, aten.clone.default, aten.detach.default, aten.lift_fresh_copy.default, aten.contiguous.default)
def identity(g: GraphBuilder, node: fx.Node, x: fx.Node, **kwargs: Any) -> ir.Value:
    return g.value(x)
