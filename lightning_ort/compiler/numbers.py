"""Symbolic sizes and scalars among the values of a graph."""

from __future__ import annotations

import torch
from torch import fx

__all__ = ["is_number"]


def is_number(node: fx.Node) -> bool:
    """Whether ``node`` is a symbolic size or scalar, not a tensor."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))
