"""Symbolic sizes and Python scalars that are known only at run time."""

from __future__ import annotations

import math
import operator
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.exact_floats import IN_GRAPHS
from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, shape_of
from lightning_ort.compiler.lowering.registry import NotLowered, lowers
from lightning_ort.compiler.symbolic_shapes import entries_in_order

aten = torch.ops.aten


@lowers(aten.sym_size.int)
def sym_size(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int) -> ir.Value:
    dim %= len(shape_of(x))
    return g.op("Shape", g.value(x), start=dim, end=dim + 1)


@lowers(aten.sym_numel.default)
def sym_numel(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    return g.op("Reshape", g.op("Size", g.value(x)), g.ints([1]))


@lowers(aten.sym_stride.int)
def sym_stride(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int) -> ir.Value:
    val = x.meta["val"]
    if entries_in_order(val.shape, val.stride()) is None:
        raise NotLowered("a stride of a tensor that is not contiguous")
    sizes = g.op("Shape", g.value(x), start=dim % len(shape_of(x)) + 1)
    return g.op("ReduceProd", sizes, keepdims=1)


def _number(g: GraphBuilder, arg: Any, dtype: torch.dtype) -> ir.Value:
    """A symbolic or Python number in the form that results of ``dtype`` have (int64: vector of length 1)."""
    if dtype == torch.int64 and isinstance(arg, fx.Node) and dtype_of(arg) == torch.int64:
        return g.value(arg)
    if dtype == torch.int64:
        return g.ints([int(arg)])
    return g.operand(arg, dtype)


def _arithmetic(op_type: str) -> Any:
    def lower(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
        dtype = dtype_of(node)
        return g.op(op_type, _number(g, a, dtype), _number(g, b, dtype))

    return lower


for _target, _op in {operator.add: "Add", operator.sub: "Sub", operator.mul: "Mul"}.items():
    lowers(_target)(_arithmetic(_op))


@lowers(operator.truediv, torch.sym_float)
def truediv(g: GraphBuilder, node: fx.Node, a: Any, b: Any = 1) -> ir.Value:
    return g.op("Div", g.operand(a, torch.float64), g.operand(b, torch.float64))


@lowers(operator.pow)
def power(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
    dtype = dtype_of(node)
    return g.op("Pow", _number(g, a, dtype), _number(g, b, dtype))


@lowers(operator.neg)
def negative(g: GraphBuilder, node: fx.Node, a: Any) -> ir.Value:
    return g.op("Neg", _number(g, a, dtype_of(node)))


@lowers(operator.floordiv)
def floordiv(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
    if dtype_of(node) != torch.int64:
        return g.op("Floor", g.op("Div", g.operand(a, torch.float64), g.operand(b, torch.float64)))
    x, y = _number(g, a, torch.int64), _number(g, b, torch.int64)
    return g.op("Div", g.op("Sub", x, g.op("Mod", x, y)), y)  # ONNX Div truncates; Mod has Python's sign


@lowers(operator.mod)
def modulo(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
    if dtype_of(node) != torch.int64:
        raise NotLowered("modulo of symbolic floats")
    return g.op("Mod", _number(g, a, torch.int64), _number(g, b, torch.int64))


@lowers(torch.sym_sum)
def sym_sum(g: GraphBuilder, node: fx.Node, terms: Any) -> ir.Value:
    values = [_number(g, t, dtype_of(node)) for t in terms]
    total = values[0]
    for value in values[1:]:
        total = g.op("Add", total, value)
    return total


def _compared(op_type: str, negate: bool = False) -> Any:
    def lower(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
        is_whole = all((dtype_of(v) if isinstance(v, fx.Node) else type(v)) in (torch.int64, int) for v in (a, b))
        dtype = torch.int64 if is_whole else torch.float64
        result = g.op(op_type, g.operand(a, dtype), g.operand(b, dtype))
        return g.op("Not", result) if negate else result

    return lower


for _target, _op, _negate in (
    (operator.eq, "Equal", False), (operator.ne, "Equal", True), (operator.gt, "Greater", False),
    (operator.ge, "GreaterOrEqual", False), (operator.lt, "Less", False), (operator.le, "LessOrEqual", False),
):  # fmt: skip
    lowers(_target)(_compared(_op, _negate))


@lowers(torch.sym_max)
def sym_max(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
    return g.op("Max", _number(g, a, dtype_of(node)), _number(g, b, dtype_of(node)))


@lowers(torch.sym_min)
def sym_min(g: GraphBuilder, node: fx.Node, a: Any, b: Any) -> ir.Value:
    return g.op("Min", _number(g, a, dtype_of(node)), _number(g, b, dtype_of(node)))


def _rounding(op_type: str) -> Any:
    def lower(g: GraphBuilder, node: fx.Node, a: Any) -> ir.Value:
        rounded = g.op(op_type, g.operand(a, torch.float64)) if op_type else g.operand(a, torch.float64)
        return g.op("Reshape", g.cast(rounded, torch.float64, torch.int64), g.ints([1]))

    return lower


for _function, _op in {math.ceil: "Ceil", math.floor: "Floor", math.trunc: "", torch.sym_int: ""}.items():
    lowers(_function)(_rounding(_op))


def _of_float(op_type: str) -> Any:
    def lower(g: GraphBuilder, node: fx.Node, a: Any) -> ir.Value:
        return g.op(op_type, g.operand(a, torch.float64))

    return lower


for _function_of_float, _op in {torch.sym_sqrt: "Sqrt", IN_GRAPHS["exp"]: "Exp", IN_GRAPHS["log"]: "Log"}.items():
    lowers(_function_of_float)(_of_float(_op))


@lowers(aten._local_scalar_dense.default)
def local_scalar_dense(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    target = dtype_of(node)
    value = g.cast(g.value(x), dtype_of(x), target)
    return g.op("Reshape", value, g.ints([1] if target == torch.int64 else []))
