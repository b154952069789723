"""Drop graph inputs that nothing reads."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["RemoveUnusedInputsPass", "StandardOperatorsPass"]


class RemoveUnusedInputsPass(ir.passes.InPlacePass):
    """A tensor that is only looked at for its static shape need not be bound at each run."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        unused = [v for v in graph.inputs if not v.uses() and not v.is_graph_output()]
        for value in unused:
            graph.inputs.remove(value)
        return ir.passes.PassResult(model, modified=bool(unused))


class StandardOperatorsPass(ir.passes.InPlacePass):
    """Replace ``FusedMatMul`` of three-dimensional tensors, and what ONNX Runtime 1.19 cannot optimize.

    That version fails on a quotient of 1 and a cast value that is a factor of a product (DivMulFusion); such quotients
    become ``Reciprocal``.

    Raises:
        ValueError: another operator that is not of the standard.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in list(model.graph):
            if node.op_type == "FusedMatMul":
                self._write_out(model.graph, node)
                modified = True
            elif node.domain:
                raise ValueError(f"{node.domain}.{node.op_type} (node {node.name!r}) is no standard operator.")
            elif node.op_type == "Div" and _is_one(node.inputs[0]):
                self._replace(model.graph, node, ir.node("Reciprocal", [node.inputs[1]], name=node.name))
                modified = True
        for domain in [d for d in model.graph.opset_imports if d]:
            del model.graph.opset_imports[domain]
        return ir.passes.PassResult(model, modified=modified)

    def _write_out(self, graph: ir.Graph, node: ir.Node) -> None:
        attributes = {a.name: a.value for a in node.attributes.values()}
        if attributes != {"transB": 1}:
            raise ValueError(f"FusedMatMul with {attributes} (node {node.name!r}) has no standard form here.")
        transposed = ir.node("Transpose", [node.inputs[1]], {"perm": [0, 2, 1]}, name=f"{node.name}/Transpose")
        transposed.outputs[0].name = f"{node.name}/transposed"
        graph.insert_before(node, transposed)
        self._replace(graph, node, ir.node("MatMul", [node.inputs[0], transposed.outputs[0]], name=node.name))

    def _replace(self, graph: ir.Graph, node: ir.Node, new: ir.Node) -> None:
        ir.convenience.replace_nodes_and_values(graph, node, [node], [new], node.outputs, new.outputs)


def _is_one(value: ir.Value | None) -> bool:
    constant = None if value is None else value.const_value
    return constant is not None and constant.size == 1 and constant.numpy().item() == 1
