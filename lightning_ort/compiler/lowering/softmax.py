"""Softmax and log-softmax."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, rank_of
from lightning_ort.compiler.lowering.registry import lowers
from lightning_ort.compiler.lowering.shapes import is_empty

aten = torch.ops.aten


def _normalized(op_type: str) -> Any:
    def lower(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, half_to_float: bool) -> ir.Value:
        value, rank = g.operand(x, dtype_of(node)), rank_of(x)
        if rank == 0:
            row = g.op(op_type, g.op("Reshape", value, g.ints([1])), axis=0)
            return g.op("Reshape", row, g.ints([]))
        axis = dim % rank
        return g.op(op_type, value, axis=axis) if axis == rank - 1 or is_empty(x) else _inner(g, op_type, value, axis)

    return lower


def _inner(g: GraphBuilder, op_type: str, value: ir.Value, axis: int) -> ir.Value:
    """Written out along a dimension that is not the last one, which ONNX Runtime would move there and back."""
    axes = g.ints([axis])
    shifted = g.op("Sub", value, g.op("ReduceMax", value, axes, keepdims=1))
    exponential = g.op("Exp", shifted)
    total = g.op("ReduceSum", exponential, axes, keepdims=1)
    if op_type == "Softmax":
        return g.op("Div", exponential, total)
    return g.op("Sub", shifted, g.op("Log", total))


lowers(aten._softmax.default)(_normalized("Softmax"))
lowers(aten._log_softmax.default)(_normalized("LogSoftmax"))


@lowers(aten._softmax_backward_data.default)
def softmax_backward(g: GraphBuilder, node: fx.Node, grad: fx.Node, out: fx.Node, dim: int, dtype: Any) -> ir.Value:
    """out * (grad - sum(grad * out))"""
    kind, rank = dtype_of(out), rank_of(out)
    gradient, y = g.operand(grad, kind), g.value(out)
    total = g.op("Mul", gradient, y)
    if rank:
        total = g.op("ReduceSum", total, g.ints([dim % rank]), keepdims=1)
    return g.cast(g.op("Mul", g.op("Sub", gradient, total), y), kind, dtype_of(node))
