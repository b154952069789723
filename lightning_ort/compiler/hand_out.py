"""Gradients handed out without torch's engine, which takes longer for that than a small step to compute them."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from lightning_ort.compiler.autograd import LossStep, makes_nan, multiply
from lightning_ort.compiler.tensor_hooks import active

__all__ = ["hand_out", "node_of_loss"]


def node_of_loss(loss: Any) -> Any:
    """The node of the :class:`LossStep` whose only output with a gradient is ``loss``; ``None`` if it is none."""
    node: Any = getattr(loss, "grad_fn", None)
    if getattr(node, "_forward_cls", None) is not LossStep or loss._backward_hooks or loss.retains_grad:
        return None
    return node if len(node.positions) == 1 and not node.apart else None


def hand_out(loss: torch.Tensor, node: Any) -> bool:
    """Give parameters their gradients as ``loss.backward()`` would, if it would do nothing else.

    Args:
        loss: a scalar, the output of ``node`` or that divided by a number.
        node: from :func:`node_of_loss`; it has no hooks, which could not be seen here.

    Returns:
        Whether that is done. If not, because somebody waits for a gradient on its way, because one reaches other
        tensors than parameters, or because torch has to compute it, nothing has been changed.

    Raises:
        RuntimeError: eager would refuse the gradients.
    """
    factor = _factor_of(loss, node)
    if factor is None or (factor != 1.0 and node.region.in_float16):
        return False
    if loss._backward_hooks or loss.retains_grad or node.kept is None or node.gradients is None:
        return False
    if node.scaled or active(node.watched) or torch.is_anomaly_enabled() or torch.autograd._profiler_enabled():
        return False
    args = node.kept.args
    pairs = [(args[i], g) for i, g in zip(node.region.wanted, node.gradients, strict=True) if g is not None]
    if any(_is_watched(p) or not p.is_contiguous() for p, _ in pairs):
        return False
    # somebody else who holds an end may have put hooks there
    idle = _idle_references()
    if any(count > idle for count in _references(node.next_functions)):
        return False
    before = [p.grad for p, _ in pairs]
    if any(b is not None and not _takes(b, g) for b, (_, g) in zip(before, pairs, strict=True)):
        return False
    gradients = [g for _, g in pairs]
    if not math.isfinite(factor) or makes_nan(factor, gradients):
        return False
    node.kept.check([node.loss])
    node.kept = node.gradients = None
    multiply(gradients, factor)
    sums = [(b, g) for b, g in zip(before, gradients, strict=True) if b is not None]
    if sums:
        torch._foreach_add_(*map(list, zip(*sums, strict=True)))
    for (p, g), b in zip(pairs, before, strict=True):
        if b is None:
            p.grad = g
    return True


def _factor_of(loss: torch.Tensor, node: Any) -> float | None:
    """The gradient that arrives at ``node``; ``None`` if that is not known."""
    last: Any = loss.grad_fn
    if last is node:
        return 1.0
    if type(last).__name__ != "DivBackward0" or last.next_functions != ((node, *node.positions), (None, 0)):
        return None
    number = last._saved_other
    if number.device.type != "cpu":  # waiting for it would take longer than the engine
        return None
    return 1.0 if number.item() == 1 else (torch.ones((), dtype=loss.dtype) / number).item()


def _is_watched(tensor: Any) -> bool:
    """Whether its gradient goes elsewhere than to its ``grad``, or is of another type there."""
    is_end = type(tensor) is torch.nn.Parameter and tensor.is_leaf
    return (
        not is_end
        or tensor.grad_dtype is not tensor.dtype
        or bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)
    )


def _takes(total: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether ``gradient`` can be added to ``total`` in place."""
    alike = total.dtype == gradient.dtype and total.device == gradient.device and total.layout == gradient.layout
    return alike and type(total) is torch.Tensor and not total.requires_grad


def _references(functions: Sequence[tuple[Any, int]]) -> list[int]:
    """How many refer to each of the nodes, those of this function included."""
    return [sys.getrefcount(function) for function, _ in functions]


@functools.cache
def _idle_references() -> int:
    """:func:`_references` of an end of a graph that nobody but the graph refers to."""
    graph: Any = torch.zeros((), requires_grad=True) * 2  # alive meanwhile: torch counts differently where it is not
    (count,) = _references(graph.grad_fn.next_functions[:1])
    return count
