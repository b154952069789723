"""Who updates faster, torch or ONNX Runtime: a rule from measurements (see docs/optimizers.md)."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from lightning_ort.optim.lamb import Lamb

__all__ = ["why_torch_is_faster"]

FEWEST = 6
"""Tensors from which one graph for all of them is faster than a handful of torch calls for each."""

LARGEST = 2048
"""Elements of an average tensor up to which it is; beyond, the passes over memory decide, where torch needs fewer."""


def why_torch_is_faster(optimizer: Optimizer) -> str | None:
    """Why torch's own update of ``optimizer`` is at least as fast; ``None`` if ONNX Runtime's is faster.

    It depends on class, settings and sizes alone, so that the same program always gets the same answer.
    """
    groups = optimizer.param_groups
    params = [p for group in groups for p in group["params"] if p.requires_grad]
    if any(p.device.type != "cpu" for p in params):
        return "nothing has been measured on a device other than the CPU"
    for flag in ("fused", "foreach"):
        if any(group.get(flag) for group in groups):
            return f"{flag}=True is at least as fast"
    if type(optimizer) is torch.optim.SGD:
        return "SGD is too little work to hand over"
    elements = sum(p.numel() for p in params) / max(len(params), 1)
    largest = 2 * LARGEST if type(optimizer) is Lamb else LARGEST
    if len(params) < FEWEST or elements > largest:
        return (
            f"it has {len(params)} tensors of {elements:.0f} elements on average; ONNX Runtime is faster from {FEWEST} "
            f"tensors on, of {largest} elements at most"
        )
    return None
