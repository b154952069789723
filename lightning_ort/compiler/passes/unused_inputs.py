"""Drop graph inputs that nothing reads."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["RemoveUnusedInputsPass"]


class RemoveUnusedInputsPass(ir.passes.InPlacePass):
    """A tensor that is only looked at for its static shape need not be bound at each run."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        unused = [v for v in graph.inputs if not v.uses() and not v.is_graph_output()]
        for value in unused:
            graph.inputs.remove(value)
        return ir.passes.PassResult(model, modified=bool(unused))
