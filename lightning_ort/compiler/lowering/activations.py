"""Activation functions."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of
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
    """By a factor: ONNX Runtime's Where takes several times as long."""
    dtype = dtype_of(node)
    passed = g.cast(g.op("Greater", g.value(x), g.constant(threshold, dtype_of(x))), torch.bool, dtype)
    return g.op("Mul", passed, operands(g, node, dtype, grad, x)[0])


@lowers(aten.hardtanh.default)
def hardtanh(g: GraphBuilder, node: fx.Node, x: fx.Node, min_val: Any = -1, max_val: Any = 1) -> ir.Value:
    return clamp(g, node, x, min_val, max_val)


@lowers(aten.leaky_relu.default)
def leaky_relu(g: GraphBuilder, node: fx.Node, x: fx.Node, negative_slope: Any = 0.01) -> ir.Value:
    dtype = dtype_of(node)
    value = g.operand(x, dtype)
    if dtype != torch.float64:
        return g.op("LeakyRelu", value, alpha=float(negative_slope))
    return _by_sign(g, value, value, g.op("Mul", value, g.constant(negative_slope, dtype)), dtype)


@lowers(aten.elu.default)
def elu(g: GraphBuilder, node: fx.Node, x: fx.Node, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> ir.Value:
    dtype = dtype_of(node)
    value = g.operand(x, dtype)
    if dtype != torch.float64 and input_scale == 1:
        result = g.op("Elu", value, alpha=float(alpha))
        return result if scale == 1 else g.op("Mul", result, g.constant(scale, dtype))
    positive = value if scale == 1 else g.op("Mul", value, g.constant(scale, dtype))
    scaled = value if input_scale == 1 else g.op("Mul", value, g.constant(input_scale, dtype))
    # The exponential of a positive number, which may overflow, is not used.
    growth = g.op("Sub", g.op("Exp", g.op("Min", scaled, g.constant(0, dtype))), g.constant(1, dtype))
    return _by_sign(g, value, positive, g.op("Mul", growth, g.constant(alpha * scale, dtype)), dtype)


def _by_sign(g: GraphBuilder, value: ir.Value, positive: ir.Value, other: ir.Value, dtype: torch.dtype) -> ir.Value:
    return g.op("Where", g.op("Greater", value, g.constant(0, dtype)), positive, other)


@lowers(aten.gelu.default)
def gelu(g: GraphBuilder, node: fx.Node, x: fx.Node, approximate: str = "none") -> ir.Value:
    dtype = dtype_of(node)
    if dtype == torch.float32:
        return g.op("Gelu", g.value(x), approximate=approximate)
    value = g.operand(x, dtype)
    half = g.op("Mul", value, g.constant(0.5, dtype))
    if approximate == "tanh":
        cube = g.op("Mul", g.op("Mul", g.op("Mul", value, value), value), g.constant(0.044715, dtype))
        inner = g.op("Tanh", g.op("Mul", g.op("Add", value, cube), g.constant(math.sqrt(2 / math.pi), dtype)))
    else:
        inner = g.op("Erf", g.op("Mul", value, g.constant(math.sqrt(0.5), dtype)))
    return g.op("Mul", half, g.op("Add", inner, g.constant(1, dtype)))
