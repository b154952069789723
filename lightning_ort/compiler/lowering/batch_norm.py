"""Batch normalization, forward and backward, in few passes over the activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, rank_of, shape_of
from lightning_ort.compiler.lowering.registry import NotLowered, lowers
from lightning_ort.compiler.lowering.sums import summed

aten = torch.ops.aten


class _Channels:
    """Sums over all but the channels of tensors shaped like ``x``, and vectors over channels that broadcast to it."""

    def __init__(self, g: GraphBuilder, x: fx.Node) -> None:
        self.g, self.rank = g, rank_of(x)
        self.dtype = torch.float64 if dtype_of(x) == torch.float64 else torch.float32
        sizes = self.sizes = shape_of(x)
        counted = [sizes[0], *sizes[2:]]
        if all(isinstance(s, int) for s in counted):
            self.count = g.constant(torch.Size(counted).numel(), self.dtype)
        elif isinstance(sizes[1], int):
            count = g.op("Div", g.op("Size", g.value(x)), g.constant(sizes[1], torch.int64))
            self.count = g.cast(count, torch.int64, self.dtype)
        else:
            raise NotLowered("batch norm over a dynamic number of channels")

    def sum(self, value: ir.Value) -> ir.Value:
        # Adding up each image first is what ONNX Runtime does fastest: 1.0 against 1.3 ms for 32 x 32 x 32 x 32.
        if self.rank > 2:
            value = summed(self.g, value, self.sizes, range(2, self.rank), self.dtype)
        return summed(self.g, value, self.sizes[:2], [0], self.dtype)

    def mean(self, value: ir.Value) -> ir.Value:
        return self.g.op("Div", self.sum(value), self.count)

    def spread(self, vector: ir.Value) -> ir.Value:
        if self.rank == 2:
            return vector
        return self.g.op("Reshape", vector, self.g.ints([-1] + [1] * (self.rank - 2)))

    def centered(self, value: ir.Value, mean: ir.Value) -> ir.Value:
        """``value - mean``, written once for forward and backward."""
        known = mean.meta.get("centered")
        if known is None or known[0] is not value:
            known = mean.meta["centered"] = (value, self.g.op("Sub", value, self.spread(mean)))
        return known[1]


def _inverse_std(g: GraphBuilder, variance: ir.Value, eps: float, dtype: torch.dtype) -> ir.Value:
    return g.op("Reciprocal", g.op("Sqrt", g.op("Add", variance, g.constant(eps, dtype))))


def _updated(g: GraphBuilder, old: fx.Node, new: ir.Value, momentum: Any, dtype: torch.dtype) -> ir.Value:
    """Running statistic ``old`` moved towards ``new``."""
    before, factor = g.operand(old, dtype), g.operand(momentum, dtype)
    moved = g.op("Add", before, g.op("Mul", g.op("Sub", new, before), factor))
    return g.cast(moved, dtype, dtype_of(old))


def _batch_norm(
    g: GraphBuilder,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    running_mean: fx.Node | None,
    running_var: fx.Node | None,
    training: bool,
    momentum: Any,
    eps: float,
) -> list[ir.Value | None]:
    """Result, mean, inverse standard deviation, new running mean and variance."""
    channels = _Channels(g, x)
    dtype = channels.dtype
    value = g.operand(x, dtype)
    new_mean = new_var = None
    if training:
        mean = channels.mean(value)
        centered = channels.centered(value, mean)
        variance = channels.mean(g.op("Mul", centered, centered))
        invstd = _inverse_std(g, variance, eps, dtype)
        if running_mean is not None:
            new_mean = _updated(g, running_mean, mean, momentum, dtype)
        if running_var is not None:
            bessel = g.op("Div", channels.count, g.op("Sub", channels.count, g.constant(1, dtype)))
            new_var = _updated(g, running_var, g.op("Mul", variance, bessel), momentum, dtype)
        statistics = [mean, invstd]
    else:
        assert running_mean is not None and running_var is not None
        mean = g.operand(running_mean, dtype)
        invstd = _inverse_std(g, g.operand(running_var, dtype), eps, dtype)
        centered = None
        new_mean, new_var = g.value(running_mean), g.value(running_var)
        statistics = [g.constant([], dtype), g.constant([], dtype)]
    scale = g.op("Mul", invstd, g.operand(weight, dtype)) if weight is not None else invstd
    shift = g.operand(bias, dtype) if bias is not None else None
    if centered is None:  # one product and one sum over x
        offset = g.op("Mul", mean, scale)
        shift = g.op("Neg", offset) if shift is None else g.op("Sub", shift, offset)
        centered = value
    result = g.op("Mul", centered, channels.spread(scale))
    if shift is not None:
        result = g.op("Add", result, channels.spread(shift))
    return [g.cast(result, dtype, dtype_of(x)), *statistics, new_mean, new_var]


@lowers(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(g: GraphBuilder, node: fx.Node, *args: Any) -> tuple[ir.Value | None, ...]:
    return tuple(_batch_norm(g, *args))


@lowers(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update(
    g: GraphBuilder, node: fx.Node, x: fx.Node, weight: Any, bias: Any, mean: fx.Node, var: fx.Node, *rest: Any
) -> tuple[ir.Value | None, ...]:
    results = _batch_norm(g, x, weight, bias, mean, var, True, *rest)
    return (*results[:3], g.constant([], torch.uint8), *results[3:])


@lowers(aten._batch_norm_no_update.default)
def batch_norm_no_update(
    g: GraphBuilder, node: fx.Node, x: fx.Node, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any
) -> tuple[ir.Value | None, ...]:
    results = _batch_norm(g, x, weight, bias, mean, var, mean is None, *rest)
    return (*results[:3], g.constant([], torch.uint8))


@lowers(aten._native_batch_norm_legit_no_training.default)
def batch_norm_no_training(
    g: GraphBuilder, node: fx.Node, x: fx.Node, weight: Any, bias: Any, mean: fx.Node, var: fx.Node, *rest: Any
) -> tuple[ir.Value | None, ...]:
    return tuple(_batch_norm(g, x, weight, bias, mean, var, False, *rest)[:3])


@lowers(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(
    g: GraphBuilder, node: fx.Node, x: fx.Node, weight: Any, bias: Any, training: bool, *rest: Any
) -> tuple[ir.Value | None, ...]:
    return tuple(_batch_norm(g, x, weight, bias, None, None, True, *rest)[:3])


@lowers(aten.native_batch_norm.default)
def native_batch_norm(
    g: GraphBuilder, node: fx.Node, x: fx.Node, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any
) -> tuple[ir.Value | None, ...]:
    if training and mean is not None:
        raise NotLowered("native_batch_norm updates its running statistics in place")
    return tuple(_batch_norm(g, x, weight, bias, mean, var, training, *rest)[:3])


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
    """The gradient of the input is a * grad + b * (x - mean) + c with a, b and c per channel."""
    channels = _Channels(g, x)
    dtype = channels.dtype
    if train:
        assert save_mean is not None and save_invstd is not None
        mean, invstd = g.operand(save_mean, dtype), g.operand(save_invstd, dtype)
    else:
        assert running_mean is not None and running_var is not None
        mean = g.operand(running_mean, dtype)
        invstd = _inverse_std(g, g.operand(running_var, dtype), eps, dtype)
    value, dy = g.operand(x, dtype), g.operand(grad, dtype)
    dx = dw = db = None
    if train or output_mask[2]:
        db = channels.sum(dy)
    if train or output_mask[1]:
        centered = channels.centered(value, mean)
        dw = g.op("Mul", channels.sum(g.op("Mul", dy, centered)), invstd)
    if output_mask[0]:
        a = g.op("Mul", invstd, g.operand(weight, dtype)) if weight is not None else invstd
        dx = g.op("Mul", dy, channels.spread(a))
        if train:
            assert dw is not None and db is not None
            per_pixel = g.op("Div", a, channels.count)
            b = g.op("Mul", g.op("Mul", per_pixel, invstd), dw)
            c = g.op("Mul", per_pixel, db)
            slope = g.op("Add", g.op("Mul", centered, channels.spread(b)), channels.spread(c))
            dx = g.op("Sub", dx, slope)
        dx = g.cast(dx, dtype, dtype_of(x))
    own = dtype if weight is None else dtype_of(weight)
    dw = g.cast(dw, dtype, own) if output_mask[1] and dw is not None else None
    db = g.cast(db, dtype, own) if output_mask[2] and db is not None else None
    return dx, dw, db
