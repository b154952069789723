"""The negative log-likelihood of class numbers, and its gradient through log-softmax."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, rank_of
from lightning_ort.compiler.lowering.registry import lowers

aten = torch.ops.aten

MEAN, SUM = 1, 2


def _class_axis(x: fx.Node) -> int:
    return 0 if rank_of(x) == 1 else 1


def _valid(g: GraphBuilder, target: fx.Node, ignore_index: int) -> tuple[ir.Value, ir.Value]:
    """Which targets count, and all of them as class numbers that exist."""
    index = g.operand(target, torch.int64)
    counts = g.op("Not", g.op("Equal", index, g.constant(ignore_index, torch.int64)))
    return counts, g.op("Where", counts, index, g.constant(0, torch.int64))


def _class_weights(
    g: GraphBuilder, counts: ir.Value, index: ir.Value, weight: fx.Node | None, dtype: torch.dtype
) -> ir.Value:
    """The weight of each target, 0 where it does not count."""
    if weight is None:
        return g.cast(counts, torch.bool, dtype)
    return g.op("Where", counts, g.op("Gather", g.operand(weight, dtype), index, axis=0), g.constant(0, dtype))


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(
    g: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    target: fx.Node,
    weight: fx.Node | None,
    reduction: int,
    ignore_index: int,
) -> Any:
    """The loss, and the sum of the weights."""
    dtype, axis = dtype_of(x), _class_axis(x)
    counts, index = _valid(g, target, ignore_index)
    weights = _class_weights(g, counts, index, weight, dtype)
    axes, zero = g.ints([axis]), g.constant(0, dtype)
    picked = g.op("GatherElements", g.value(x), g.op("Unsqueeze", index, axes), axis=axis)
    likelihood = g.op("Where", counts, g.op("Squeeze", picked, axes), zero)
    if weight is not None:
        likelihood = g.op("Mul", likelihood, weights)
    losses = g.op("Neg", likelihood)
    if reduction not in (MEAN, SUM):
        return losses, zero
    total = g.op("ReduceSum", weights, keepdims=0)
    loss = g.op("ReduceSum", losses, keepdims=0)
    return (g.op("Div", loss, total) if reduction == MEAN else loss), total


def _scattered_gradient(
    g: GraphBuilder,
    grad: fx.Node,
    x: fx.Node,
    target: fx.Node,
    weight: fx.Node | None,
    reduction: int,
    ignore_index: int,
    total: fx.Node,
) -> tuple[ir.Value, ir.Value]:
    """Index and size of the gradient's only element along the classes, both with a class axis of 1."""
    dtype, axes = dtype_of(x), g.ints([_class_axis(x)])
    counts, index = _valid(g, target, ignore_index)
    incoming = g.operand(grad, dtype)
    if reduction == MEAN:
        incoming = g.op("Div", incoming, g.operand(total, dtype))
    incoming = g.op("Neg", incoming)
    if weight is not None:
        incoming = g.op("Mul", incoming, g.op("Gather", g.operand(weight, dtype), index, axis=0))
    # not a product with the truth value: when nothing counts, the total is 0 and the quotient NaN
    size = g.op("Where", counts, incoming, g.constant(0, dtype))
    return g.op("Unsqueeze", index, axes), g.op("Unsqueeze", size, axes)


@lowers(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(g: GraphBuilder, node: fx.Node, *args: Any) -> ir.Value:
    x = args[1]
    index, size = _scattered_gradient(g, *args)
    zeros = g.op("Expand", g.constant(0, dtype_of(x)), g.shape(x))
    return g.op("ScatterElements", zeros, index, size, axis=_class_axis(x))


@lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(g: GraphBuilder, node: fx.Node, grad: fx.Node, out: fx.Node, dim: int, dtype: Any) -> ir.Value:
    """grad - exp(out) * sum(grad)

    The gradient of a likelihood has one element other than 0 for each sample. Neither it nor its sum is written out
    then: the element is added to the scaled probabilities.
    """
    kind, rank = dtype_of(out), rank_of(out)
    probabilities = g.op("Exp", g.value(out))
    if _is_nll_gradient(g, grad, out, dim):
        index, size = _scattered_gradient(g, *grad.args)
        scaled = g.op("Mul", probabilities, g.op("Neg", size))
        result = g.op("ScatterElements", scaled, index, size, axis=dim % rank, reduction="add")
    else:
        gradient = g.operand(grad, kind)
        total = g.op("ReduceSum", gradient, g.ints([dim % rank]), keepdims=1) if rank else gradient
        result = g.op("Sub", gradient, g.op("Mul", probabilities, total))
    return g.cast(result, kind, dtype_of(node))


def _is_nll_gradient(g: GraphBuilder, grad: fx.Node, out: fx.Node, dim: int) -> bool:
    if grad.target not in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default):
        return False
    is_known = all(g.knows(a) for a in grad.all_input_nodes)
    return is_known and dtype_of(grad) == dtype_of(out) != torch.float16 and dim % rank_of(out) == _class_axis(out)
