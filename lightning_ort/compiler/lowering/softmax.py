"""Softmax and log-softmax."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, rank_of
from lightning_ort.compiler.lowering.registry import lowers

aten = torch.ops.aten


def _normalized(op_type: str) -> Any:
    def lower(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, half_to_float: bool) -> ir.Value:
        value, rank = g.operand(x, dtype_of(node)), rank_of(x)
        if rank == 0:
            row = g.op(op_type, g.op("Reshape", value, g.ints([1])), axis=0)
            return g.op("Reshape", row, g.ints([]))
        return g.op(op_type, value, axis=dim % rank)

    return lower


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
