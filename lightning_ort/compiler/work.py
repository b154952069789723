"""How much arithmetic a part of a graph is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

__all__ = ["SMALL", "operations"]

aten = torch.ops.aten

SMALL = 2e7
"""Operations below which a second thread costs more than it gains: waking it takes as long as the work (measured on
networks of 1 to 80 million operations, 2 cores)."""


def operations(nodes: Iterable[fx.Node]) -> float:
    """Floating-point operations of the products and convolutions, plus one per entry of every other result."""
    return sum(_operations(node) for node in nodes)


def _operations(node: fx.Node) -> float:
    val = node.meta.get("val")
    if node.target is aten.convolution_backward.default:
        # the weight's gradient takes as much as the forward pass, and so does the image's
        return sum(node.args[-1][:2]) * _convolution(_fake(node.args[0]), _fake(node.args[2]), node.args[7])
    if node.op != "call_function" or not isinstance(val, torch.Tensor):
        return 0.0
    size = _entries(val)
    if node.target in (aten.mm.default, aten.bmm.default):
        return 2 * size * _hint(_fake(node.args[0]).shape[-1])
    if node.target in (aten.addmm.default, aten.baddbmm.default):
        return 2 * size * _hint(_fake(node.args[1]).shape[-1])
    if node.target is aten.convolution.default:
        return _convolution(val, _fake(node.args[1]), node.args[6])
    return size


def _convolution(result: torch.Tensor, weight: torch.Tensor, transposed: Any) -> float:
    # each entry of the result sums over a filter; in a transposed convolution the weight's second size are the results
    filters = _hint(weight.shape[1 if transposed else 0])
    return 2 * _entries(result) * _entries(weight) / max(filters, 1)


def _fake(argument: Any) -> torch.Tensor:
    return argument.meta["val"]


def _entries(fake: torch.Tensor) -> float:
    return math.prod((_hint(size) for size in fake.shape), start=1.0)


def _hint(size: Any) -> int:
    """A size, or for a symbolic one that of the batch it was first seen with."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 1
    return int(size)
