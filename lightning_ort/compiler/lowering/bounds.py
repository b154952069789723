"""Positions that torch does not count from the end, which ONNX would: negative ones are made errors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder
from lightning_ort.runtime.value_errors import CIRCLE

aten = torch.ops.aten

_SOURCES = {
    aten.argmax.default,
    aten.argmin.default,
    aten.bucketize.Tensor,
    aten.ones_like.default,
    aten.searchsorted.Tensor,
    aten.zeros_like.default,
}
_SECOND_RESULTS = {
    aten.max.dim,
    aten.min.dim,
    aten.sort.default,
    aten.sort.stable,
    aten.topk.default,
}
_VIEWS = {
    aten.expand.default,
    aten.permute.default,
    aten.repeat.default,
    aten.reshape.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten._unsafe_view.default,
}


def positions(g: GraphBuilder, index: fx.Node, size: Any) -> ir.Value:
    """``index`` as int64, for an operator of torch that accepts 0 to ``size`` - 1.

    Gather, GatherElements, ScatterElements and their like count negative positions from the end. Here those become
    positions beyond any end, so that ONNX Runtime's own check of bounds refuses them.
    """
    g.accept(f"0 to {size - 1}" if isinstance(size, int) else "0 to the size of the dimension - 1")
    value = g.operand(index, torch.int64)
    return value if _is_not_negative(index) else unwrapped(g, value)


def unwrapped(g: GraphBuilder, index: ir.Value) -> ir.Value:
    """int64 positions with very large ones in the place of negative ones; for values that have no fx node."""
    # a remainder is not negative; a comparison and a choice take four times as long for a few labels
    return g.op("Mod", index, g.constant(CIRCLE, torch.int64))


def wrapping_positions(g: GraphBuilder, indices: Sequence[fx.Node], sizes: Sequence[Any]) -> list[ir.Value]:
    """``indices`` as int64, for an operator of torch that counts negative ones from the end, as ONNX does."""
    ranges = [f"-{s} to {s - 1}" if isinstance(s, int) else "those of the dimension" for s in sizes]
    g.accept(ranges[0] if len(set(ranges)) == 1 else ", ".join(ranges))
    return [g.operand(index, torch.int64) for index in indices]


def behind_views(node: Any) -> Any:
    """What made the elements of ``node``, which views have only put in another order."""
    while isinstance(node, fx.Node) and node.target in _VIEWS:
        node = node.args[0]
    return node


def _is_not_negative(node: Any) -> bool:
    """Whether the integers of ``node`` are at least 0 by the way they are made."""
    node = behind_views(node)
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source, number = node.args
        return isinstance(source, fx.Node) and source.target in _SECOND_RESULTS and number == 1
    if node.target is aten.arange.start_step:
        start, _, *step = node.args
        return _is_at_least(start, 0) and (not step or _is_at_least(step[0], 1))
    if node.target in (aten.clamp.default, aten.clamp_min.default, aten.full.default):
        return len(node.args) > 1 and _is_at_least(node.args[1], 0)
    return node.target in _SOURCES


def _is_at_least(argument: Any, least: int) -> bool:
    return isinstance(argument, int) and argument >= least
