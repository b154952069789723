"""Choices between two tensors."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, rank_of, shape_of
from lightning_ort.compiler.lowering.finite import is_finite
from lightning_ort.compiler.lowering.pointwise import is_tensor, operands
from lightning_ort.compiler.lowering.registry import lowers
from lightning_ort.compiler.lowering.shapes import same_shape

aten = torch.ops.aten


@lowers(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(g: GraphBuilder, node: fx.Node, condition: fx.Node, a: Any, b: Any) -> ir.Value:
    """Where, or cheaper arithmetic: ONNX Runtime's takes as long as five to fifty multiplications."""
    out = dtype_of(node)
    if out in (torch.float32, torch.float64):
        for number, kept, chooses_number in ((_number(a), b, True), (_number(b), a, False)):
            if number is not None and _brings_shape(node, kept) and is_finite(kept):
                result = _with_number(g, node, condition, kept, number, chooses_number)
                if result is not None:
                    return result
    dtype = torch.int32 if out in (torch.int8, torch.int16, torch.bool) else out
    _, *chosen = operands(g, node, dtype, condition, a, b)
    return g.cast(g.op("Where", _condition(g, node, condition), *chosen), dtype, out)


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(g: GraphBuilder, node: fx.Node, x: fx.Node, mask: fx.Node, value: Any) -> ir.Value:
    return where(g, node, mask, value, x)


def _condition(g: GraphBuilder, node: fx.Node, condition: fx.Node) -> ir.Value:
    return g.cast(g.compact.get(condition, g.value(condition)), dtype_of(condition), torch.bool)


def _number(arg: Any) -> float | None:
    """The number that ``arg`` is or holds everywhere."""
    if isinstance(arg, fx.Node):
        position = {aten.scalar_tensor.default: 0, aten.full.default: 1, aten.full_like.default: 1}.get(arg.target)
        if position is None:
            return 0 if arg.target is aten.zeros_like.default else None
        arg = arg.args[position]
    return None if not isinstance(arg, (int, float)) or math.isnan(arg) else arg


def _brings_shape(node: fx.Node, arg: Any) -> bool:
    return is_tensor(arg) and dtype_of(arg) == dtype_of(node) and same_shape(shape_of(arg), shape_of(node))


def _with_number(
    g: GraphBuilder, node: fx.Node, condition: fx.Node, kept: fx.Node, number: float, chooses_number: bool
) -> ir.Value | None:
    """``kept``, which is finite, with ``number`` where the condition says so."""
    dtype, value, mask = dtype_of(node), g.value(kept), _condition(g, node, condition)
    if number == 0:
        keeps = g.op("Not", mask) if chooses_number else mask
        return g.op("Mul", value, g.cast(keeps, torch.bool, dtype))
    is_whole = condition not in g.compact and same_shape(shape_of(condition), shape_of(node))
    if is_whole or not rank_of(node):
        return None
    # A mask that is repeated, as an attention mask is for each head, becomes bounds of its own small size.
    result = value
    for op_type, free in (("Max", -math.inf), ("Min", math.inf)):
        if number != free:
            bound, open_end = g.constant(number, dtype), g.constant(free, dtype)
            bounds = g.op("Where", mask, *((bound, open_end) if chooses_number else (open_end, bound)))
            result = g.op(op_type, result, bounds)
    return result
