"""Numbers that change from step to step, as arguments of operators whose gradients would settle them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["as_tensors"]

_POSITIONS: dict[Any, int] = {
    **dict.fromkeys((operator.pow, torch.pow, "pow", "__pow__"), 1),
    **dict.fromkeys((torch.lerp, "lerp"), 2),
}
"""Function, or name of a method, to the position of the number."""
_TYPES = (torch.float32, torch.float64)
"""in which a tensor rounds a number as torch's kernels do"""


def as_tensors(region: fx.GraphModule) -> None:
    """Make a tensor of the exponent of ``x ** self.k``, and of a weight of ``lerp``, in Dynamo's graph.

    The gradient of a power asks whether its exponent is zero, and with a number that becomes an assumption: each value
    would be compiled by itself.
    """
    changed = False
    for node in list(region.graph.nodes):
        position = _POSITIONS.get(node.target) if node.op in ("call_function", "call_method") else None
        if position is None or len(node.args) <= position:
            continue
        x, number = (_example(node.args[i]) for i in (0, position))
        is_open = isinstance(number, (torch.SymFloat, torch.SymInt))
        if not is_open or not isinstance(x, FakeTensor) or x.dtype not in _TYPES:
            continue
        with region.graph.inserting_before(node):
            tensor = region.graph.call_method("new_full", (node.args[0], (), node.args[position]))
        with x.fake_mode:
            tensor.meta["example_value"] = x.new_full((), 0.0)
        if "stack_trace" in node.meta:
            tensor.meta["stack_trace"] = node.meta["stack_trace"]
        node.update_arg(position, tensor)
        changed = True
    if changed:
        region.recompile()


def _example(argument: Any) -> Any:
    return argument.meta.get("example_value") if isinstance(argument, fx.Node) else None
