"""Compute cheap values again where the backward pass needs them, instead of keeping them since the forward pass."""

from __future__ import annotations

import math

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

__all__ = ["RecomputePass"]

# one pass over memory each; what they read is often kept for the backward pass anyway
_CHEAP = {"Add", "Mul", "Sub"}
_VIEWS = {"Reshape", "Squeeze", "Unsqueeze"}
_LONGEST = 2
"""cheap operators in a row that are run again: a layer normalization ends with two"""
_FAR = 50
"""nodes between two uses that belong to different passes"""
_SMALLEST = 2**16
"""entries below which memory is not worth a node"""


class RecomputePass(ir.passes.InPlacePass):
    """Split values with early and late uses, where the late ones can be had from what is there anyway.

    The outputs of activations and normalizations and the attention weights after dropout are inputs of a matrix
    product, which reads them once in the forward and once in the backward pass. The operands that they are made of
    stay until then in any case, because the gradient of the operator itself needs them. Nothing lives longer than
    before: an operand is only used where it has a later use already, or is an input of the graph.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = list(model.graph)
        if len(nodes) <= _FAR:
            return ir.passes.PassResult(model, modified=False)
        self._shapes = _shapes(model)
        self._position = {node: i for i, node in enumerate(nodes)}
        modified = False
        for node in nodes:
            if node.op_type in _CHEAP | _VIEWS and len(node.outputs) == 1:
                modified |= self._split(model.graph, node)
        return ir.passes.PassResult(model, modified=modified)

    def _split(self, graph: ir.Graph, node: ir.Node) -> bool:
        value = node.outputs[0]
        if value.is_graph_output() or not self._is_large(value):
            return False
        uses = sorted(((self._position[u.node], u.node, u.idx) for u in value.uses()), key=lambda use: use[0])
        late = [use for use in uses if use[0] - self._position[node] >= _FAR]
        if not late:
            return False
        first = late[0][1]
        chain = self._chain(node, self._position[first])
        if chain is None:
            return False
        copies: dict[ir.Value, ir.Value] = {}
        for original in chain:
            inputs = [copies.get(x, x) if x is not None else None for x in original.inputs]
            attributes = list(original.attributes.values())
            copy = ir.Node(
                original.domain, original.op_type, inputs, attributes, num_outputs=1, name=f"{original.name}_again"
            )
            copy.outputs[0].name = f"{original.outputs[0].name}_again"
            copies[original.outputs[0]] = copy.outputs[0]
            graph.insert_before(first, copy)
            self._position[copy] = self._position[first]
        for _, user, index in late:
            user.replace_input_with(index, copies[value])
        return True

    def _chain(self, node: ir.Node, needed: int, length: int = 0) -> list[ir.Node] | None:
        """Nodes to run again for the value of ``node`` at position ``needed``; ``None`` if that costs memory."""
        length += node.op_type in _CHEAP
        if length > _LONGEST:
            return None
        chain: list[ir.Node] = []
        for x in node.inputs:
            if x is None or self._is_there(x, needed):
                continue
            producer = x.producer()
            if producer is None or producer.op_type not in _CHEAP | _VIEWS or chain:
                return None
            before = self._chain(producer, needed, length)
            if before is None:
                return None
            chain = before
        # a view alone saves nothing: it keeps what it is a view of
        if length == 0 and not chain:
            return None
        return [*chain, node]

    def _is_there(self, value: ir.Value, position: int) -> bool:
        if value.producer() is None:
            return True
        return any(self._position[u.node] >= position for u in value.uses())

    def _is_large(self, value: ir.Value) -> bool:
        shape = self._shapes.get(value.name)
        if shape is None:
            return True
        known = [d for d in shape if d is not None]
        return math.prod(known) >= _SMALLEST if len(known) == len(shape) else len(shape) > 1


def _shapes(model: ir.Model) -> dict[str | None, list[int | None]]:
    """Sizes by name, as far as they can be told, from a copy: they are of no use to ONNX Runtime."""
    inferred = ShapeInferencePass()(ir.from_proto(ir.to_proto(model))).model
    values = (v for node in inferred.graph for v in node.outputs)
    return {v.name: [d if isinstance(d, int) else None for d in v.shape] for v in values if v.shape is not None}
