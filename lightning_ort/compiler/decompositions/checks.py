"""Values that eager's kernels refuse and a rewriting would take: assertions that the graph keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ort.compiler.decompositions.composites import composes

__all__ = ["refuse_unless"]

aten = torch.ops.aten


def refuse_unless(condition: Tensor, message: str) -> None:
    """Make a run fail with ``message`` where an element of the bool tensor ``condition`` is false."""
    torch._assert_async(condition.all(), message)


@composes(aten._assert_async.default)
def assert_async(condition: Tensor) -> Any:
    """Without a message it would be taken for dead code."""
    torch._assert_async(condition, "Expected Tensor with single nonzero value, but got zero")
