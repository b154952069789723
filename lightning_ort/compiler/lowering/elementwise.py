"""Element-wise arithmetic, and how operands of element-wise operators meet."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, shape_of
from lightning_ort.compiler.lowering.registry import NotLowered, lowers
from lightning_ort.compiler.lowering.shapes import is_empty, same_shape
from lightning_ort.runtime.providers.cpu import gives
from lightning_ort.runtime.tensors import NUMPY

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


def ordered_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type to compare and order in: that of truth values is int32 as well."""
    return torch.int32 if dtype == torch.bool else computing_dtype(dtype)


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in: ONNX Runtime lacks arithmetic on the smallest integers."""
    return torch.int32 if dtype in SMALL_INTEGERS else dtype


def elementwise(
    g: GraphBuilder, node: fx.Node, dtype: torch.dtype, write: Callable[..., ir.Value], *args: Any
) -> ir.Value:
    """The result of ``write``, which takes one ONNX value of ``dtype`` for each of ``args``.

    ONNX broadcasts too, so that operands which repeat a smaller tensor need not be expanded. The result repeats one
    itself if all of them do.
    """
    if not any(a in g.compact for a in args if isinstance(a, fx.Node)):
        return write(*(g.operand(a, dtype) for a in args))
    small = [
        g.cast(g.compact[a], dtype_of(a), dtype) if isinstance(a, fx.Node) and a in g.compact else g.operand(a, dtype)
        for a in args
    ]
    full = [a for a in args if is_tensor(a) and same_shape(shape_of(a), shape_of(node))]
    if any(a not in g.compact for a in full):
        return write(*small)
    if not full:
        return write(*(g.operand(a, dtype) for a in args))
    g.compact[node] = result = write(*small)
    return g.op("Expand", result, g.shape(full[0]))


def is_tensor(arg: Any) -> bool:
    return isinstance(arg, fx.Node) and isinstance(arg.meta["val"], torch.Tensor)


def operands(
    g: GraphBuilder, node: fx.Node, dtype: torch.dtype, *args: Any, through: torch.dtype | None = None
) -> list[ir.Value]:
    """``args`` of an element-wise call as ONNX values of ``dtype``, not expanded where another has the full shape.

    Args:
        g: where they are written.
        node: the call.
        dtype: the type to compute in.
        args: nodes and numbers.
        through: torch's type for them, where ``dtype`` holds more: what does not fit wraps, and fractions are true.
    """
    whole, type_ = is_whole(g, node, *args), dtype if through is None else through
    return [
        g.cast(
            g.cast(g.compact[a], dtype_of(a), type_)
            if whole and is_tensor(a) and a in g.compact
            else g.operand(a, type_),
            type_,
            dtype,
        )
        for a in args
    ]


def wrapped(number: Any, dtype: torch.dtype) -> Any:
    """``number`` as torch takes it beside tensors of ``dtype``, if it is a number."""
    is_one = dtype in SMALL_INTEGERS and isinstance(number, int)
    return int(np.asarray(number).astype(NUMPY[dtype])) if is_one else number


def is_whole(g: GraphBuilder, node: fx.Node, *args: Any) -> bool:
    """Whether one of ``args`` has the shape of ``node`` in ONNX as well, so that the others need not be expanded."""
    return any(is_tensor(a) and a not in g.compact and same_shape(shape_of(a), shape_of(node)) for a in args)


def _binary(op_type: str) -> Any:
    def lower(g: GraphBuilder, node: fx.Node, a: Any, b: Any, *, alpha: Any = 1) -> ir.Value:
        out = dtype_of(node)
        dtype = computing_dtype(out)

        def write(x: ir.Value, y: ir.Value) -> ir.Value:
            if alpha != 1 and out != torch.bool:
                y = g.op("Mul", y, g.operand(alpha, dtype))
            if out == torch.bool:
                if op_type not in ("Add", "Mul"):
                    raise NotLowered(f"{op_type} of bool tensors")
                return g.op("Or" if op_type == "Add" else "And", x, y)
            return g.cast(g.op(op_type, x, y), dtype, out)

        return elementwise(g, node, dtype, write, a, b)

    return lower


lowers(aten.add.Tensor, aten.add.Scalar)(_binary("Add"))
lowers(aten.sub.Tensor, aten.sub.Scalar)(_binary("Sub"))
lowers(aten.mul.Tensor, aten.mul.Scalar)(_binary("Mul"))


@lowers(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(g: GraphBuilder, node: fx.Node, a: Any, b: Any, alpha: Any = 1) -> ir.Value:
    out = dtype_of(node)
    dtype = computing_dtype(out)
    x, y = operands(g, node, dtype, a, b)
    if alpha != 1:
        x = g.op("Mul", x, g.operand(alpha, dtype))
    return g.cast(g.op("Sub", y, x), dtype, out)


@lowers(aten.div.Tensor, aten.div.Scalar)
def div(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
    return elementwise(g, node, dtype_of(node), functools.partial(g.op, "Div"), a, b)


def _division(g: GraphBuilder, x: ir.Value, y: ir.Value, divisor: Any, dtype: torch.dtype) -> tuple[ir.Value, ir.Value]:
    """Integers to divide with the same result, of which ONNX Runtime divides any without ending the process.

    It does for 0, where torch raises an error, and for the smallest integer and -1, where torch gives the former.
    """
    if (isinstance(divisor, int) and divisor not in (0, -1)) or (is_tensor(divisor) and is_empty(divisor)):
        return x, y
    is_zero = g.op("Equal", y, g.constant(0, dtype))
    g.require(g.op("Not", g.op("ReduceMax", is_zero, keepdims=0)), "ZeroDivisionError")
    negates = g.op("Equal", y, g.constant(-1, dtype))
    x = g.where(negates, g.op("Sub", g.constant(0, dtype), x), x, dtype)
    return x, g.where(g.op("Or", is_zero, negates), g.constant(1, dtype), y, dtype)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(g: GraphBuilder, node: fx.Node, a: Any, b: Any, rounding_mode: str | None = None) -> ir.Value:
    dtype = dtype_of(node)
    if rounding_mode is None:
        return div(g, node, a, b)
    if dtype.is_floating_point:

        def write(x: ir.Value, y: ir.Value) -> ir.Value:
            quotient = g.op("Div", x, y)
            return _floored(g, x, y, quotient, dtype) if rounding_mode == "floor" else _truncated(g, quotient)

        return elementwise(g, node, dtype, write, a, b)
    wide = computing_dtype(dtype)
    x, y = operands(g, node, wide, a, b, through=dtype)
    x, y = _division(g, x, y, wrapped(b, dtype), wide)
    if rounding_mode == "floor":
        x = g.op("Sub", x, g.op("Mod", x, y))
    return g.cast(g.op("Div", x, y), wide, dtype)


def _floored(g: GraphBuilder, x: ir.Value, y: ir.Value, quotient: ir.Value, dtype: torch.dtype) -> ir.Value:
    """The quotient without the rest, as in torch and Python: 1 // 0.1 is 9, because 0.1 is more than a tenth."""
    zero, one = g.constant(0, dtype), g.constant(1, dtype)
    rest, moves = _rest(g, x, y, zero)
    whole = g.op("Div", g.op("Sub", x, rest), y)
    whole = g.op("Round", g.where(moves, g.op("Sub", whole, one), whole, dtype))
    whole = g.where(g.op("Equal", whole, zero), g.op("Mul", quotient, zero), whole, dtype)  # of its sign
    return g.where(g.op("Equal", y, zero), quotient, whole, dtype)


def _rest(g: GraphBuilder, x: ir.Value, y: ir.Value, zero: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The rest of a truncated division, which is exact, and where it is on the other side than the divisor."""
    rest = g.op("Mod", x, y, fmod=1)
    is_opposite = g.op("Xor", *(g.op("Less", v, zero) for v in (rest, y)))
    return rest, g.op("And", is_opposite, g.op("Not", g.op("Equal", rest, zero)))


@lowers(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
    return div_mode(g, node, a, b, rounding_mode="floor")


@lowers(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
    dtype = computing_dtype(dtype_of(node))
    x, y = operands(g, node, dtype, a, b, through=dtype_of(node))
    if dtype.is_floating_point:
        rest, moves = _rest(g, x, y, g.constant(0, dtype))
        return g.where(moves, g.op("Add", rest, y), rest, dtype)
    divisor = wrapped(b, dtype_of(node))
    return g.cast(g.op("Mod", *_division(g, x, y, divisor, dtype)), dtype, dtype_of(node))


@lowers(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
    dtype = computing_dtype(dtype_of(node))
    x, y = operands(g, node, dtype, a, b, through=dtype_of(node))
    if not dtype.is_floating_point:
        x, y = _division(g, x, y, wrapped(b, dtype_of(node)), dtype)
    return g.cast(g.op("Mod", x, y, fmod=1), dtype, dtype_of(node))


def square_root(g: GraphBuilder, value: ir.Value, dtype: torch.dtype) -> ir.Value:
    """The root of ``value``; ONNX Runtime 1.19 makes NaN of infinity, and infinity of what is below normal numbers."""
    if dtype == torch.float64 or gives("Sqrt", math.inf, math.inf):
        return g.op("Sqrt", value)
    is_small = g.op("Less", value, g.constant(torch.finfo(torch.float32).tiny, dtype))
    lifted = g.where(is_small, g.op("Mul", value, g.constant(2.0**48, dtype)), value, dtype)
    root = g.op("Sqrt", lifted)
    root = g.where(is_small, g.op("Mul", root, g.constant(2.0**-24, dtype)), root, dtype)
    infinity = g.constant(math.inf, dtype)
    return g.where(g.op("Equal", value, infinity), infinity, root, dtype)


def reciprocal_deviation(g: GraphBuilder, variance: ir.Value, eps: float, dtype: torch.dtype) -> ir.Value:
    """1 / sqrt(variance + eps); NaN, as in torch, for a variance that has overflowed: 0 would make 0 of all numbers."""
    rstd = g.op("Reciprocal", g.op("Sqrt", g.op("Add", variance, g.constant(eps, dtype))))
    return g.op("Add", rstd, g.op("Mul", variance, g.constant(0, dtype)))


def exponential(g: GraphBuilder, value: ir.Value, dtype: torch.dtype) -> ir.Value:
    """e to the power of ``value``, 0 where that is -inf."""
    result = g.op("Exp", value)
    if dtype != torch.float64 or gives("Exp", -math.inf, 0.0, double=True):
        return result
    vanishes = g.op("Less", value, g.constant(-746, dtype))
    return g.where(vanishes, g.constant(0, dtype), result, dtype)


@lowers(aten.pow.Tensor_Scalar)
def pow_scalar(g: GraphBuilder, node: fx.Node, a: fx.Node, exponent: Any) -> ir.Value:
    dtype = computing_dtype(dtype_of(node))
    x = g.operand(a, dtype)
    if not dtype.is_floating_point:
        result = _whole_power(g, x, exponent, dtype)
    elif exponent == 2:
        result = g.op("Mul", x, x)
    elif exponent == 1:
        result = x
    elif exponent in (3, 4):
        square = g.op("Mul", x, x)
        result = g.op("Mul", square, x if exponent == 3 else square)
    elif exponent == 0.5:
        result = square_root(g, x, dtype)
    elif exponent == -1:
        result = g.op("Reciprocal", x)
    elif exponent == -0.5:
        result = g.op("Reciprocal", square_root(g, x, dtype))
    else:
        result = g.op("Pow", x, g.operand(exponent, dtype))
    return g.cast(result, dtype, dtype_of(node))


def _whole_power(g: GraphBuilder, x: ir.Value, exponent: Any, dtype: torch.dtype) -> ir.Value:
    """A power of integers by products, which wrap as torch's do; ONNX Runtime's own goes through float64."""
    if not isinstance(exponent, int) or exponent < 0:
        raise NotLowered("a power of integers by a number that is not known, or negative")
    if exponent == 0:
        return g.op("Add", g.op("Mul", x, g.constant(0, dtype)), g.constant(1, dtype))
    bits = bin(exponent)[3:]
    result = x
    for bit in bits:
        result = g.op("Mul", result, result)
        if bit == "1":
            result = g.op("Mul", result, x)
    return result


@lowers(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
    dtype = computing_dtype(dtype_of(node))
    if not dtype.is_floating_point and a not in (1, 2):  # of which float64 holds all powers that int64 does
        raise NotLowered("a power of integers by a tensor: ONNX Runtime computes it in floating point")
    x, y = operands(g, node, dtype, a, b)
    return g.cast(g.op("Pow", x, y), dtype, dtype_of(node))


def _extremum(op_type: str, *, ignores_nan: bool = False) -> Any:
    def lower(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
        out = dtype_of(node)
        dtype = ordered_dtype(out)
        x, y = operands(g, node, dtype, a, b, through=out)
        if ignores_nan and dtype.is_floating_point:
            x, y = g.where(g.op("IsNaN", x), y, x, dtype), g.where(g.op("IsNaN", y), x, y, dtype)
        return g.cast(g.op(op_type, x, y), dtype, out)

    return lower


lowers(aten.maximum.default)(_extremum("Max"))
lowers(aten.minimum.default)(_extremum("Min"))
lowers(aten.fmax.default)(_extremum("Max", ignores_nan=True))
lowers(aten.fmin.default)(_extremum("Min", ignores_nan=True))


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(g: GraphBuilder, node: fx.Node, x: fx.Node, min: Any = None, max: Any = None) -> ir.Value:
    out = dtype_of(node)
    dtype = ordered_dtype(out)
    value = g.operand(x, dtype)
    if isinstance(min, (int, float)) and isinstance(max, (int, float)) and min <= max:
        return g.cast(g.op("Clip", value, g.constant(min, dtype), g.constant(max, dtype)), dtype, out)
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


def _unary_any(op_type: str) -> Any:
    """Operators that integers have too, some only in wider types."""

    def lower(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
        out = dtype_of(node)
        dtype = computing_dtype(out)
        if op_type in ("Floor", "Ceil", "Round") and not out.is_floating_point:
            return g.value(x)
        return g.cast(g.op(op_type, g.operand(x, dtype)), dtype, out)

    return lower


for _name, _op in {
    "abs": "Abs", "neg": "Neg", "floor": "Floor", "ceil": "Ceil", "round": "Round",
}.items():  # fmt: skip
    lowers(getattr(aten, _name).default)(_unary_any(_op))


@lowers(aten.sign.default, aten.sgn.default)
def sign(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    """By comparisons: Sign takes twice as long, and NaN has the sign 0 in torch."""
    dtype = dtype_of(node)
    if dtype not in (torch.float32, torch.float64):
        wide = ordered_dtype(dtype)
        return g.cast(g.op("Sign", g.operand(x, wide)), wide, dtype)
    value, zero = g.value(x), g.constant(0, dtype)
    above, below = (g.cast(g.op(c, value, zero), torch.bool, dtype) for c in ("Greater", "Less"))
    return g.op("Sub", above, below)


@lowers(aten.round.decimals)
def round_decimals(g: GraphBuilder, node: fx.Node, x: fx.Node, *, decimals: int) -> ir.Value:
    scale = g.constant(10.0 ** abs(decimals), dtype_of(node))
    back, forth = ("Div", "Mul") if decimals >= 0 else ("Mul", "Div")
    return g.op(back, g.op("Round", g.op(forth, g.value(x), scale)), scale)


def _truncated(g: GraphBuilder, value: ir.Value) -> ir.Value:
    return g.op("Mul", g.op("Sign", value), g.op("Floor", g.op("Abs", value)))


@lowers(aten.trunc.default)
def trunc(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    return _truncated(g, g.value(x)) if dtype_of(node).is_floating_point else g.value(x)


@lowers(aten.hypot.default)
def hypot(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
    """Scaled by the larger side, whose square may not fit."""
    dtype = dtype_of(node)
    x, y = (g.op("Abs", v) for v in operands(g, node, dtype, a, b))
    larger, smaller = g.op("Max", x, y), g.op("Min", x, y)
    is_trivial = g.op("Or", *(g.op("Equal", larger, g.constant(c, dtype)) for c in (0, math.inf)))
    ratio = g.op("Div", smaller, g.where(is_trivial, g.constant(1, dtype), larger, dtype))
    length = g.op("Mul", larger, g.op("Sqrt", g.op("Add", g.op("Mul", ratio, ratio), g.constant(1, dtype))))
    infinity = g.constant(math.inf, dtype)
    is_infinite = g.op("Or", *(g.op("Equal", v, infinity) for v in (x, y)))  # whatever the other side is
    return g.where(is_infinite, infinity, g.where(is_trivial, larger, length, dtype), dtype)


@lowers(aten._to_copy.default)
def to_copy(g: GraphBuilder, node: fx.Node, x: fx.Node, **kwargs: Any) -> ir.Value:
    """Conversion of the element type; where the tensor lives is settled before lowering."""
    source, target = dtype_of(x), dtype_of(node)
    if source.is_floating_point and target in SMALL_INTEGERS:
        # torch goes through a wide integer and wraps; ONNX leaves out-of-range conversions undefined
        return g.cast(g.cast(g.value(x), source, torch.int64), torch.int64, target)
    return g.cast(g.value(x), source, target)


@lowers(
    aten.alias.default, aten.clone.default, aten.detach.default, aten.contiguous.default,
    aten.lift.default, aten.lift_fresh.default, aten.lift_fresh_copy.default,
)  # fmt: skip
def identity(g: GraphBuilder, node: fx.Node, x: fx.Node, **kwargs: Any) -> ir.Value:
    return g.value(x)
