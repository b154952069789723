"""Whether the gradients of a loss come unscaled out of graphs, and how they are unscaled where they do not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from lightning_ort.compiler.scaling import LossScaling

__all__ = ["is_closed", "unscaling_leaves"]


def is_closed(loss: torch.Tensor) -> bool:
    """Whether all gradients of ``loss`` are computed by graphs that scale their loss, and go to parameters at once.

    Otherwise gradients pass through torch, in 16 bits maybe, and the loss has to be scaled there.
    """
    # needs ONNX Runtime, whose absence shall be explained and not break the import of this package
    from lightning_ort.compiler.region import Region

    pending: list[tuple[Any, int]] = [(loss.grad_fn, loss.output_nr)]
    seen: set[Any] = set()
    graphs = 0
    while pending:
        node, output = pending.pop()
        if node is None:
            continue
        if not isinstance(getattr(node, "region", None), Region):
            if not node.next_functions:  # a parameter, reached by torch
                return False
            if node not in seen:
                seen.add(node)
                pending += node.next_functions
        else:
            # a graph of gradients by themselves has no loss to scale
            if getattr(node, "finite", None) is None or node.gradients is None:
                return False
            if node.positions.get(output) != node.loss or not _ends(node):
                return False
            graphs += 1
    return graphs > 0


def _ends(node: Any) -> bool:
    """Whether nothing but parameters comes after ``node``."""
    return all(after is None or not after.next_functions for after, _ in node.next_functions)


@contextlib.contextmanager
def unscaling_leaves(loss: torch.Tensor, scaling: LossScaling) -> Iterator[None]:
    """Unscale gradients as they reach the parameters of ``loss``, while its scaled ones are computed.

    Each parameter adds an unscaled gradient to what it has, from this or other ways.
    """
    scale, hooks = scaling.scale, []

    def unscale(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        scaling.note(torch.isfinite(gradient).all(), [parameter])
        return gradient / scale

    for parameter in _leaves(loss):
        hooks.append(parameter.register_hook(lambda g, p=parameter: unscale(g, p)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """Parameters that the gradient of ``loss`` reaches."""
    pending, seen, leaves = [loss.grad_fn], set(), []
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        pending += [after for after, _ in node.next_functions]
    return leaves
