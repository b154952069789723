"""Compute cheap values again where the backward pass needs them, instead of keeping them since the forward pass."""

from __future__ import annotations

import math
from collections import Counter

import onnx_ir as ir

__all__ = ["SIZES", "RecomputePass"]

SIZES = "sizes"
"""key in ``ir.Value.meta`` for the sizes of a value, ``None`` for each that changes; not written into files"""

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
        self._position = {node: i for i, node in enumerate(nodes)}
        self._copies: Counter[ir.Node] = Counter()
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
            # one node may be part of what several values are made of
            self._copies[original] += 1
            again = "_again" if self._copies[original] == 1 else f"_again_{self._copies[original]}"
            copy = ir.Node(
                original.domain, original.op_type, inputs, attributes, num_outputs=1, name=f"{original.name}{again}"
            )
            copy.outputs[0].name = f"{original.outputs[0].name}{again}"
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
        sizes = _sizes(value)
        if sizes is None:
            return True
        known = [size for size in sizes if size is not None]
        return math.prod(known) >= _SMALLEST if len(known) == len(sizes) else len(sizes) > 1


def _sizes(value: ir.Value) -> tuple[int | None, ...] | None:
    """Sizes of ``value`` as far as they can be told from what was noted where it or its operands were written."""
    if SIZES in value.meta:
        return value.meta[SIZES]
    if value.shape is not None:
        return tuple(d if isinstance(d, int) else None for d in value.shape)
    producer = value.producer()
    if producer is None or producer.op_type not in _CHEAP | _VIEWS:
        return None
    operands = producer.inputs[:1] if producer.op_type in _VIEWS else producer.inputs
    found = [None if x is None else _sizes(x) for x in operands]
    known = [sizes for sizes in found if sizes is not None]
    if len(known) < len(found):
        return None
    # of as many entries as its largest operand, or more
    return max(known, key=lambda sizes: (None in sizes, math.prod(size or 1 for size in sizes)))
