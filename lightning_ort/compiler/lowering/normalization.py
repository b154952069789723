"""Batch and layer normalization, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, rank_of, shape_of
from lightning_ort.compiler.lowering.registry import NotLowered, lowers

aten = torch.ops.aten


def _result_dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"][0].dtype


def _per_channel(g: GraphBuilder, x: fx.Node, value: ir.Value) -> ir.Value:
    """A vector over channels in a shape that broadcasts against ``x``."""
    rank = rank_of(x)
    return g.op("Reshape", value, g.ints([-1] + [1] * (rank - 2))) if rank > 2 else value


def _all_but_channels(x: fx.Node) -> list[int]:
    return [0, *range(2, rank_of(x))]


def _count_per_channel(g: GraphBuilder, x: fx.Node, dtype: torch.dtype) -> ir.Value:
    sizes = [shape_of(x)[i] for i in _all_but_channels(x)]
    if all(isinstance(s, int) for s in sizes):
        return g.constant(torch.Size(sizes).numel(), dtype)
    count = g.op("Div", g.op("Size", g.value(x)), g.constant(int(shape_of(x)[1]), torch.int64))
    return g.cast(count, torch.int64, dtype)


def _inverse_std(g: GraphBuilder, variance: ir.Value, eps: float, dtype: torch.dtype) -> ir.Value:
    return g.op("Reciprocal", g.op("Sqrt", g.op("Add", variance, g.constant(eps, dtype))))


def _normalized(
    g: GraphBuilder, x: fx.Node, mean: ir.Value, invstd: ir.Value, weight: fx.Node | None, bias: fx.Node | None
) -> ir.Value:
    """(x - mean) * invstd * weight + bias, as one product and one sum over ``x``."""
    scale = g.op("Mul", invstd, g.value(weight)) if weight is not None else invstd
    shift = g.op("Mul", mean, scale)
    shift = g.op("Sub", g.value(bias), shift) if bias is not None else g.op("Neg", shift)
    return g.op("Add", g.op("Mul", g.value(x), _per_channel(g, x, scale)), _per_channel(g, x, shift))


def _moments(g: GraphBuilder, x: fx.Node, dtype: torch.dtype) -> tuple[ir.Value, ir.Value]:
    axes = g.ints(_all_but_channels(x))
    mean = g.op("ReduceMean", g.value(x), axes, keepdims=0)
    centered = g.op("Sub", g.value(x), _per_channel(g, x, mean))
    return mean, g.op("ReduceMean", g.op("Mul", centered, centered), axes, keepdims=0)


def _blend(g: GraphBuilder, old: fx.Node, new: ir.Value, momentum: float) -> ir.Value:
    dtype = dtype_of(old)
    kept = g.op("Mul", g.value(old), g.constant(1 - momentum, dtype))
    return g.op("Add", kept, g.op("Mul", new, g.constant(momentum, dtype)))


def _batch_norm(
    g: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    running_mean: fx.Node | None,
    running_var: fx.Node | None,
    training: bool,
    momentum: float,
    eps: float,
) -> list[ir.Value | None]:
    """Result, mean, inverse standard deviation, new running mean and variance."""
    dtype = dtype_of(x)
    if any(v is not None and dtype_of(v) != dtype for v in (weight, bias, running_mean, running_var)):
        raise NotLowered("batch norm with parameters of another dtype than its input")
    if not training:
        assert running_mean is not None and running_var is not None
        mean, invstd = g.value(running_mean), _inverse_std(g, g.value(running_var), eps, dtype)
        result = _normalized(g, x, mean, invstd, weight, bias)
        empty = g.constant([], dtype)
        return [result, empty, empty, g.value(running_mean), g.value(running_var)]
    mean, variance = _moments(g, x, dtype)
    invstd = _inverse_std(g, variance, eps, dtype)
    result = _normalized(g, x, mean, invstd, weight, bias)
    new_mean = new_var = None
    if running_mean is not None:
        new_mean = _blend(g, running_mean, mean, momentum)
    if running_var is not None:
        count = _count_per_channel(g, x, dtype)
        unbiased = g.op("Div", count, g.op("Sub", count, g.constant(1, dtype)))
        new_var = _blend(g, running_var, g.op("Mul", variance, unbiased), momentum)
    return [result, mean, invstd, new_mean, new_var]


@lowers(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(g: GraphBuilder, node: fx.Node, *args: Any) -> tuple[ir.Value | None, ...]:
    return tuple(_batch_norm(g, node, *args))


@lowers(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update(
    g: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    running_mean: fx.Node,
    running_var: fx.Node,
    momentum: float,
    eps: float,
) -> tuple[ir.Value | None, ...]:
    results = _batch_norm(g, node, x, weight, bias, running_mean, running_var, True, momentum, eps)
    return (*results[:3], g.constant([], torch.uint8), *results[3:])


@lowers(aten._batch_norm_no_update.default)
def batch_norm_no_update(
    g: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    running_mean: fx.Node | None,
    running_var: fx.Node | None,
    momentum: float,
    eps: float,
) -> tuple[ir.Value | None, ...]:
    training = running_mean is None
    results = _batch_norm(g, node, x, weight, bias, running_mean, running_var, training, momentum, eps)
    return (*results[:3], g.constant([], torch.uint8))


@lowers(aten._native_batch_norm_legit_no_training.default)
def batch_norm_no_training(
    g: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    running_mean: fx.Node,
    running_var: fx.Node,
    momentum: float,
    eps: float,
) -> tuple[ir.Value | None, ...]:
    return tuple(_batch_norm(g, node, x, weight, bias, running_mean, running_var, False, momentum, eps)[:3])


@lowers(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(
    g: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[ir.Value | None, ...]:
    return tuple(_batch_norm(g, node, x, weight, bias, None, None, True, momentum, eps)[:3])


@lowers(aten.native_batch_norm.default)
def native_batch_norm(g: GraphBuilder, node: fx.Node, *args: Any) -> tuple[ir.Value | None, ...]:
    x, weight, bias, running_mean, running_var, training, momentum, eps = args
    if training and running_mean is not None:
        raise NotLowered("native_batch_norm updates its running statistics in place")
    return tuple(_batch_norm(g, node, x, weight, bias, running_mean, running_var, training, momentum, eps)[:3])


@lowers(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    g: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    running_mean: fx.Node | None,
    running_var: fx.Node | None,
    save_mean: fx.Node | None,
    save_invstd: fx.Node | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[ir.Value | None, ...]:
    """Gradient of the input as one linear combination a * grad + b * x + c with a, b, c per channel."""
    dtype = dtype_of(x)
    if train:
        assert save_mean is not None and save_invstd is not None
        mean, invstd = g.value(save_mean), g.value(save_invstd)
    else:
        assert running_mean is not None and running_var is not None
        mean, invstd = g.value(running_mean), _inverse_std(g, g.value(running_var), eps, dtype)
    dy, axes = g.value(grad), g.ints(_all_but_channels(x))
    sum_dy = sum_dy_xhat = None
    if train or output_mask[2]:
        sum_dy = g.op("ReduceSum", dy, axes, keepdims=0)
    if train or output_mask[1]:
        products = g.op("ReduceSum", g.op("Mul", dy, g.value(x)), axes, keepdims=0)
        if sum_dy is None:
            sum_dy = g.op("ReduceSum", dy, axes, keepdims=0)
        sum_dy_xhat = g.op("Mul", g.op("Sub", products, g.op("Mul", mean, sum_dy)), invstd)
    dx = None
    if output_mask[0]:
        a = g.op("Mul", invstd, g.value(weight)) if weight is not None else invstd
        dx = g.op("Mul", dy, _per_channel(g, x, a))
        if train:
            assert sum_dy is not None and sum_dy_xhat is not None
            count = _count_per_channel(g, x, dtype)
            b = g.op("Neg", g.op("Mul", a, g.op("Mul", invstd, g.op("Div", sum_dy_xhat, count))))
            c = g.op("Neg", g.op("Add", g.op("Mul", b, mean), g.op("Mul", a, g.op("Div", sum_dy, count))))
            affine = g.op("Add", g.op("Mul", g.value(x), _per_channel(g, x, b)), _per_channel(g, x, c))
            dx = g.op("Add", dx, affine)
    return dx, (sum_dy_xhat if output_mask[1] else None), (sum_dy if output_mask[2] else None)


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
    dtype = dtype_of(x)
    if any(v is not None and dtype_of(v) != dtype for v in (weight, bias)):
        raise NotLowered("layer norm with parameters of another dtype than its input")
    axis = rank_of(x) - len(normalized_shape)
    if dtype == torch.float64:  # ONNX keeps the mean and deviation of doubles in single precision
        axes = g.ints(range(axis, rank_of(x)))
        mean = g.op("ReduceMean", g.value(x), axes, keepdims=1)
        centered = g.op("Sub", g.value(x), mean)
        variance = g.op("ReduceMean", g.op("Mul", centered, centered), axes, keepdims=1)
        invstd = _inverse_std(g, variance, eps, dtype)
        result = g.op("Mul", centered, invstd)
        if weight is not None:
            result = g.op("Mul", result, g.value(weight))
        return (g.op("Add", result, g.value(bias)) if bias is not None else result), mean, invstd
    if weight is not None:
        scale = g.value(weight)
    else:
        scale = g.op("Expand", g.constant(1, dtype), g.dims(list(normalized_shape)))
    shift = g.value(bias) if bias is not None else None
    return g.op("LayerNormalization", g.value(x), scale, shift, outputs=3, axis=axis, epsilon=eps)


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
    rank = rank_of(x)
    inner = list(range(rank - len(normalized_shape), rank))
    outer = list(range(rank - len(normalized_shape)))
    dy = g.value(grad)
    xhat = g.op("Mul", g.op("Sub", g.value(x), g.value(mean)), g.value(rstd))
    dx = None
    if output_mask[0]:
        scaled = g.op("Mul", dy, g.value(weight)) if weight is not None else dy
        axes = g.ints(inner)
        average = g.op("ReduceMean", scaled, axes, keepdims=1)
        projection = g.op("ReduceMean", g.op("Mul", scaled, xhat), axes, keepdims=1)
        rest = g.op("Sub", g.op("Sub", scaled, average), g.op("Mul", xhat, projection))
        dx = g.op("Mul", rest, g.value(rstd))
    dw = db = None
    if output_mask[1] and weight is not None:
        product = g.op("Mul", dy, xhat)
        dw = g.op("ReduceSum", product, g.ints(outer), keepdims=0) if outer else product
    if output_mask[2] and bias is not None:
        db = g.op("ReduceSum", dy, g.ints(outer), keepdims=0) if outer else dy
    return dx, dw, db
