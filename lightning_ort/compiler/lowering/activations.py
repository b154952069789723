"""Activation functions that ONNX has, and gradients that are a choice between two values."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, is_on_cpu, rank_of
from lightning_ort.compiler.lowering.elementwise import clamp, exponential, operands
from lightning_ort.compiler.lowering.finite import is_finite
from lightning_ort.compiler.lowering.registry import lowers
from lightning_ort.compiler.lowering.shapes import is_empty
from lightning_ort.runtime.providers.cpu import gives

aten = torch.ops.aten


@lowers(aten.relu.default)
def relu(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    if not dtype_of(node).is_floating_point:
        return clamp(g, node, x, min=0)
    return g.op("Relu", g.value(x))


@lowers(aten.threshold_backward.default)
def threshold_backward(g: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, threshold: Any) -> ir.Value:
    """The gradient where x is above the threshold or NaN, else 0, also in the place of a gradient that is NaN.

    Where a choice is slow, by a factor, which leaves such a gradient: unless it may well be infinite, as that of a
    square root at 0 is.
    """
    dtype = dtype_of(node)
    gradient, value = operands(g, node, dtype, grad, x)
    stopped = g.op("LessOrEqual", value, g.operand(threshold, dtype))
    if not g.chooses_slowly(dtype) or not is_finite(grad, products=True):
        return g.where(stopped, g.constant(0, dtype), gradient, dtype)
    passes = g.op("Sub", g.constant(1, dtype), g.cast(stopped, torch.bool, dtype))
    return g.op("Mul", gradient, passes)


@lowers(aten.hardtanh.default)
def hardtanh(g: GraphBuilder, node: fx.Node, x: fx.Node, min_val: Any = -1, max_val: Any = 1) -> ir.Value:
    return clamp(g, node, x, min_val, max_val)


def _normalized(op_type: str) -> Any:
    def lower(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, half_to_float: bool) -> ir.Value:
        value, rank = g.operand(x, dtype_of(node)), rank_of(x)
        if rank == 0:
            row = g.op(op_type, g.op("Reshape", value, g.ints([1])), axis=0)
            return g.op("Reshape", row, g.ints([]))
        axis = dim % rank
        dtype = dtype_of(node)
        if is_empty(x) or (axis == rank - 1 and (dtype != torch.float64 or _is_exact(op_type, node))):
            return g.op(op_type, value, axis=axis)
        return _inner(g, op_type, value, axis, dtype)

    return lower


def _is_exact(op_type: str, node: fx.Node) -> bool:
    """Whether a kernel is one for float64: a GPU's rounds to float32 on the way, that of LogSoftmax for CPUs hides a
    NaN at the end of a row, and old ones make no zeros.
    """
    return is_on_cpu(node) and op_type == "Softmax" and gives("Exp", -math.inf, 0.0, double=True)


def _inner(g: GraphBuilder, op_type: str, value: ir.Value, axis: int, dtype: torch.dtype) -> ir.Value:
    """Written out, as along a dimension that is not the last one, which ONNX Runtime would move there and back."""
    axes = g.ints([axis])
    shifted = g.op("Sub", value, g.op("ReduceMax", value, axes, keepdims=1))
    weights = exponential(g, shifted, dtype)
    total = g.op("ReduceSum", weights, axes, keepdims=1)
    if op_type == "Softmax":
        return g.op("Div", weights, total)
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
