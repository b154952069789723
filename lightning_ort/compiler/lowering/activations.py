"""Activation functions that ONNX has, and gradients that are a choice between two values."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of
from lightning_ort.compiler.lowering.finite import is_finite
from lightning_ort.compiler.lowering.pointwise import clamp, operands
from lightning_ort.compiler.lowering.registry import lowers

aten = torch.ops.aten


@lowers(aten.relu.default)
def relu(g: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    if not dtype_of(node).is_floating_point:
        return clamp(g, node, x, min=0)
    return g.op("Relu", g.value(x))


@lowers(aten.threshold_backward.default)
def threshold_backward(g: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, threshold: Any) -> ir.Value:
    """The gradient where x is above the threshold, else 0.

    By a factor, which takes half as long as a choice, unless the gradient may be infinite, as that of a square root
    at 0 is, and must be dropped.
    """
    dtype = dtype_of(node)
    gradient, value = operands(g, node, dtype, grad, x)
    if not is_finite(grad):
        passes = g.op("Greater", value, g.constant(threshold, dtype))
        return g.op("Where", passes, gradient, g.constant(0, dtype))
    if dtype not in (torch.float32, torch.float64):
        passes = g.op("Greater", value, g.constant(threshold, dtype))
        return g.op("Mul", gradient, g.cast(passes, torch.bool, dtype))
    if threshold != 0:
        value = g.op("Sub", value, g.constant(threshold, dtype))
    return g.op("Mul", gradient, _is_positive(g, value, dtype, node.meta["val"].device))


def _is_positive(g: GraphBuilder, value: ir.Value, dtype: torch.dtype, device: torch.device) -> ir.Value:
    """1 where ``value`` is above 0, else 0."""
    steepest = torch.finfo(dtype).max
    if dtype == torch.float32 and device.type == "cpu":
        # a line of that slope between 0 and 1, in one pass
        return g.op("HardSigmoid", value, alpha=steepest, beta=0.0)
    steep = g.op("Mul", value, g.constant(steepest, dtype))
    return g.op("Clip", steep, g.constant(0, dtype), g.constant(1, dtype))


@lowers(aten.hardtanh.default)
def hardtanh(g: GraphBuilder, node: fx.Node, x: fx.Node, min_val: Any = -1, max_val: Any = 1) -> ir.Value:
    return clamp(g, node, x, min_val, max_val)
