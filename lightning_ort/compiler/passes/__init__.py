"""Small rewrites of an ONNX graph, one name each."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import Sequential
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass

from lightning_ort.compiler.passes.cleanup import RemoveUnusedInputsPass, StandardOperatorsPass
from lightning_ort.compiler.passes.recompute import RecomputePass
from lightning_ort.compiler.passes.training_kernels import TrainingKernelsPass

__all__ = ["has_doubles", "has_extreme_factor", "optimize", "save_memory", "standardize", "with_training_kernels"]

_PASSES = Sequential(
    RemoveUnusedNodesPass(),  # traces hold what only their own checks have read; fewer nodes are compared next
    CommonSubexpressionEliminationPass(),  # decompositions write sizes, masks and casts anew at each use
    RemoveUnusedInputsPass(),  # last, when nothing else is left out
)


def optimize(model: ir.Model) -> ir.Model:
    """All rewrites, in order; ONNX Runtime does its own after them."""
    return _PASSES(model).model


def save_memory(model: ir.Model) -> bool:
    """Whether ``model`` now computes some values twice on purpose, which ONNX Runtime must not undo."""
    return RecomputePass()(model).modified


def has_doubles(model: ir.Model) -> bool:
    """Whether ``model`` computes in float64: what it reads, its constants and its casts tell.

    Some of ONNX Runtime's optimizations take constants for floats.
    """
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    casts = (node for node in model.graph.all_nodes() if node.op_type == "Cast")
    return any(v.dtype == ir.DataType.DOUBLE for v in values) or any(
        node.attributes["to"].as_int() == ir.DataType.DOUBLE for node in casts
    )


def has_extreme_factor(model: ir.Model) -> bool:
    """Whether ``model`` multiplies by a constant so large, or divides by one so small, that tensors may overflow by it.

    ONNX Runtime moves factors behind the products of matrices, where a sum of infinities would be not a number.
    """
    for node in model.graph.all_nodes():
        if node.op_type in ("Mul", "Div") and not node.domain:
            factors = [v.const_value for v in node.inputs if v is not None and v.const_value is not None]
            if any(f.size == 1 and not _SMALLEST < abs(float(f.numpy().item())) < _LARGEST for f in factors):
                return True
    return False


_SMALLEST, _LARGEST = 1e-15, 1e15


def with_training_kernels(model: ir.Model) -> ir.Model:
    """A copy of ``model`` with fewer operators, which only builds of ONNX Runtime for training have."""
    return _PASSES(TrainingKernelsPass()(model.clone()).model).model


def standardize(model: ir.Model) -> ir.Model:
    """``model`` in standard operators, which any ONNX Runtime accepts with all of its optimizations."""
    return StandardOperatorsPass()(model).model
