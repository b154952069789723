"""Layer and root-mean-square normalization, forward and backward.

Written out rather than with ONNX ``LayerNormalization``: ONNX Runtime 1.19 computes its variance as E[x^2] - E[x]^2,
which is off by 4e-4 for inputs around 10 and not a number for inputs around 1000.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, rank_of, shape_of
from lightning_ort.compiler.lowering.elementwise import reciprocal_deviation
from lightning_ort.compiler.lowering.registry import lowers
from lightning_ort.compiler.lowering.sums import summed

aten = torch.ops.aten


def _computing(x: fx.Node) -> torch.dtype:
    return torch.float64 if dtype_of(x) == torch.float64 else torch.float32


def _inner(x: fx.Node, normalized_shape: Sequence[Any]) -> list[int]:
    return list(range(rank_of(x) - len(normalized_shape), rank_of(x)))


def _sum_outer(g: GraphBuilder, value: ir.Value, x: fx.Node, normalized_shape: Sequence[Any]) -> ir.Value:
    outer = list(range(rank_of(x) - len(normalized_shape)))
    return summed(g, value, shape_of(x), outer, _computing(x))


def _weighted_means(
    g: GraphBuilder, values: list[ir.Value], weight: ir.Value | None, x: fx.Node, normalized_shape: Sequence[Any],
    dtype: torch.dtype,
) -> list[ir.Value]:  # fmt: skip
    """Mean of ``value * weight`` over the normalized dimensions, for each of ``values``."""
    axes = g.ints(_inner(x, normalized_shape))
    if weight is None:
        return [g.op("ReduceMean", v, axes, keepdims=1) for v in values]
    if len(normalized_shape) > 1 or not isinstance(shape_of(x)[-1], int):
        return [g.op("ReduceMean", g.op("Mul", v, weight), axes, keepdims=1) for v in values]
    width = int(shape_of(x)[-1])
    column = g.op("Reshape", g.op("Mul", weight, g.constant(1 / width, dtype)), g.ints([width, 1]))
    return [g.op("MatMul", v, column) for v in values]


@lowers(aten.native_layer_norm.default)
def native_layer_norm(
    g: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    normalized_shape: Sequence[Any],
    weight: fx.Node | None,
    bias: fx.Node | None,
    eps: float,
) -> tuple[ir.Value, ...]:
    dtype, axes = _computing(x), g.ints(_inner(x, normalized_shape))
    value = g.operand(x, dtype)
    mean = g.op("ReduceMean", value, axes, keepdims=1)
    centered = g.op("Sub", value, mean)
    variance = g.op("ReduceMean", g.op("Mul", centered, centered), axes, keepdims=1)
    rstd = reciprocal_deviation(g, variance, eps, dtype)
    result = normalized = g.op("Mul", centered, rstd)
    rstd.meta["normalized"] = (value, normalized)
    if weight is not None:
        result = g.op("Mul", result, g.operand(weight, dtype))
    if bias is not None:
        result = g.op("Add", result, g.operand(bias, dtype))
    return g.cast(result, dtype, dtype_of(x)), mean, rstd


def _normalized(g: GraphBuilder, value: ir.Value, mean: fx.Node | None, rstd: ir.Value) -> ir.Value:
    """(value - mean) * rstd, taken from the forward pass when it is in the same graph."""
    known = rstd.meta.get("normalized")
    if known is not None and known[0] is value:
        return known[1]
    return g.op("Mul", value if mean is None else g.op("Sub", value, g.value(mean)), rstd)


@lowers(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(
    g: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    normalized_shape: Sequence[Any],
    mean: fx.Node,
    rstd: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    output_mask: Sequence[bool],
) -> tuple[ir.Value | None, ...]:
    """rstd * (dy * w - mean(dy * w) - xhat * mean(dy * w * xhat)); the means are products with the vector w."""
    dtype = _computing(x)
    dy, scale = g.operand(grad, dtype), g.value(rstd)
    xhat = _normalized(g, g.operand(x, dtype), mean, scale)
    w = g.operand(weight, dtype) if weight is not None else None
    product = g.op("Mul", dy, xhat)
    dx = dw = db = None
    if output_mask[0]:
        average, projection = _weighted_means(g, [dy, product], w, x, normalized_shape, dtype)
        scaled = g.op("Mul", dy, w) if w is not None else dy
        rest = g.op("Sub", g.op("Sub", scaled, average), g.op("Mul", xhat, projection))
        dx = g.cast(g.op("Mul", rest, scale), dtype, dtype_of(x))
    if output_mask[1] and weight is not None:
        dw = g.cast(_sum_outer(g, product, x, normalized_shape), dtype, dtype_of(weight))
    if output_mask[2] and bias is not None:
        db = g.cast(_sum_outer(g, dy, x, normalized_shape), dtype, dtype_of(bias))
    return dx, dw, db


@lowers(aten._fused_rms_norm.default)
def fused_rms_norm(
    g: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    normalized_shape: Sequence[Any],
    weight: fx.Node | None,
    eps: float | None,
) -> tuple[ir.Value, ...]:
    dtype, axes = _computing(x), g.ints(_inner(x, normalized_shape))
    value = g.operand(x, dtype)
    square = g.op("ReduceMean", g.op("Mul", value, value), axes, keepdims=1)
    small = g.constant(torch.finfo(dtype).eps if eps is None else eps, dtype)
    rstd = g.op("Reciprocal", g.op("Sqrt", g.op("Add", square, small)))
    result = normalized = g.op("Mul", value, rstd)
    rstd.meta["normalized"] = (value, normalized)
    if weight is not None:
        result = g.op("Mul", result, g.operand(weight, dtype))
    return g.cast(result, dtype, dtype_of(x)), rstd


@lowers(aten._fused_rms_norm_backward.default)
def fused_rms_norm_backward(
    g: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    normalized_shape: Sequence[Any],
    rstd: fx.Node,
    weight: fx.Node | None,
    output_mask: Sequence[bool],
) -> tuple[ir.Value | None, ...]:
    dtype = _computing(x)
    dy, scale = g.operand(grad, dtype), g.value(rstd)
    xhat = _normalized(g, g.operand(x, dtype), None, scale)
    w = g.operand(weight, dtype) if weight is not None else None
    product = g.op("Mul", dy, xhat)
    dx = dw = None
    if output_mask[0]:
        (projection,) = _weighted_means(g, [product], w, x, normalized_shape, dtype)
        scaled = g.op("Mul", dy, w) if w is not None else dy
        dx = g.op("Mul", g.op("Sub", scaled, g.op("Mul", xhat, projection)), scale)
        dx = g.cast(dx, dtype, dtype_of(x))
    if output_mask[1] and weight is not None:
        dw = g.cast(_sum_outer(g, product, x, normalized_shape), dtype, dtype_of(weight))
    return dx, dw
