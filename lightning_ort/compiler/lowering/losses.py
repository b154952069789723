"""The negative log-likelihood of class numbers, and its gradient through log-softmax."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.bounds import unwrapped
from lightning_ort.compiler.lowering.builder import Dim, GraphBuilder, dtype_of, rank_of, shape_of
from lightning_ort.compiler.lowering.elementwise import exponential
from lightning_ort.compiler.lowering.registry import lowers
from lightning_ort.compiler.lowering.sums import summed

aten = torch.ops.aten

MEAN, SUM = 1, 2


def _class_axis(x: fx.Node) -> int:
    return 0 if rank_of(x) == 1 else 1


class _Targets:
    """Class numbers, with an axis of 1 where the scores have the classes.

    Attributes:
        counts: which of them are not ignored.
        ones: 1 for those, 0 for the others.
        index: all of them, 0 where they do not count; what is no class is too large for any operator.
        axes: that axis, for an operator.
    """

    def __init__(self, g: GraphBuilder, x: fx.Node, target: fx.Node, weight: fx.Node | None, ignore_index: Dim) -> None:
        self._g, self._dtype, self._weight = g, dtype_of(x), weight
        self.axes = g.ints([_class_axis(x)])
        numbers = g.op("Unsqueeze", g.operand(target, torch.int64), self.axes)
        self.counts = g.op("Not", g.op("Equal", numbers, g.operand(ignore_index, torch.int64)))
        self.ones = g.cast(self.counts, torch.bool, self._dtype)
        self.index = unwrapped(g, g.op("Mul", numbers, g.cast(self.counts, torch.bool, torch.int64)))
        classes = shape_of(x)[_class_axis(x)]
        last = f"{classes - 1}" if isinstance(classes, int) else "the number of classes - 1"
        ignored = ignore_index if isinstance(ignore_index, int) else "ignore_index"
        g.accept(f"0 to {last}, and {ignored} for what does not count")

    def counted(self, value: ir.Value) -> ir.Value:
        """``value`` where a target counts, else 0, whatever ``value`` is there."""
        return self._g.where(self.counts, value, self._g.constant(0, self._dtype), self._dtype)

    def weighted(self, value: ir.Value) -> ir.Value:
        """``value`` times the weight of each target's class."""
        if self._weight is None:
            return value
        return self._g.op("Mul", value, self._g.op("Gather", self._g.operand(self._weight, self._dtype), self.index))

    def total(self) -> ir.Value:
        """The sum of the weights of all that count."""
        return self._g.op("ReduceSum", self.weighted(self.ones), keepdims=0)


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(
    g: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    target: fx.Node,
    weight: fx.Node | None,
    reduction: int,
    ignore_index: Dim,
) -> Any:
    """The loss, and the sum of the weights."""
    targets = _Targets(g, x, target, weight, ignore_index)
    picked = g.op("GatherElements", g.value(x), targets.index, axis=_class_axis(x))
    # a choice: scores of what does not count may be NaN
    losses = targets.weighted(g.op("Neg", targets.counted(picked)))
    if reduction not in (MEAN, SUM):
        return g.op("Squeeze", losses, targets.axes), g.constant(0, dtype_of(x))
    sizes = [1 if axis == _class_axis(x) else size for axis, size in enumerate(shape_of(x))]
    loss, total = summed(g, losses, sizes, range(rank_of(x)), dtype_of(x)), targets.total()
    return (g.op("Div", loss, total) if reduction == MEAN else loss), total


def _falls(
    g: GraphBuilder, targets: _Targets, grad: fx.Node, weight: fx.Node | None, dtype: torch.dtype, reduction: int
) -> ir.Value:
    """By how much the loss falls when the log-probability of a target's class grows: 0 where it does not count."""
    incoming = g.operand(grad, dtype)
    if reduction == SUM:
        return targets.counted(targets.weighted(incoming))
    if reduction != MEAN:
        return targets.counted(targets.weighted(g.op("Unsqueeze", incoming, targets.axes)))
    # counted again rather than taken from the forward pass: one graph with that pass has the sum already
    total = targets.total()
    if weight is not None:
        return targets.counted(targets.weighted(g.op("Div", incoming, total)))
    # when nothing counts, the loss is 0/0 and the gradient 0
    total = g.op("Clip", total, g.constant(1, dtype))
    if _is_one(incoming):
        return g.op("Div", targets.ones, total)
    return targets.counted(g.op("Div", incoming, total))


def _is_one(value: ir.Value) -> bool:
    return value.const_value is not None and bool((value.const_value.numpy() == 1).all())


@lowers(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    g: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    target: fx.Node,
    weight: fx.Node | None,
    reduction: int,
    ignore_index: Dim,
    total: fx.Node,
) -> ir.Value:
    targets = _Targets(g, x, target, weight, ignore_index)
    zeros = g.op("Expand", g.constant(0, dtype_of(x)), g.shape(x))
    down = g.op("Neg", _falls(g, targets, grad, weight, dtype_of(x), reduction))
    return g.op("ScatterElements", zeros, targets.index, down, axis=_class_axis(x))


@lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(g: GraphBuilder, node: fx.Node, grad: fx.Node, out: fx.Node, dim: int, dtype: Any) -> ir.Value:
    """grad - exp(out) * sum(grad)

    The gradient of a likelihood has one element other than 0 for each sample. Neither it nor its sum is written out
    then: 1 is taken from the probability of the right class.
    """
    kind, rank = dtype_of(out), rank_of(out)
    probabilities = exponential(g, g.value(out), kind)
    if _is_nll_gradient(g, grad, out, dim):
        incoming, x, target, weight, reduction, ignore_index, _ = grad.args
        targets = _Targets(g, x, target, weight, ignore_index)
        falls = _falls(g, targets, incoming, weight, kind, reduction)
        if weight is None and _is_one(g.operand(incoming, kind)):
            minus_ones = g.op("Neg", targets.ones)
        else:
            # NaN where that is infinite, as a difference of two infinities is: a product would be infinite, and could
            # be clipped to a number
            minus_ones = g.op("Sub", g.op("Sub", falls, falls), targets.ones)
        errors = g.op("ScatterElements", probabilities, targets.index, minus_ones, axis=dim % rank, reduction="add")
        result = g.op("Mul", errors, falls)
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
