"""Small rewrites of an ONNX graph, one name each."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import Sequential
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass

from lightning_ort.compiler.passes.unused_inputs import RemoveUnusedInputsPass

__all__ = ["optimize"]

_PASSES = Sequential(
    RemoveUnusedNodesPass(),
    CommonSubexpressionEliminationPass(),
    RemoveUnusedInputsPass(),
)


def optimize(model: ir.Model) -> ir.Model:
    """All rewrites, in order; ONNX Runtime does its own after them."""
    return _PASSES(model).model
