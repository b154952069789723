"""Which results of a graph may be written over one of its inputs."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["may_overwrite", "reads_last"]

# Each element of the result is computed from the elements at the same place, which have been read when it is written.
_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Where", "Sqrt", "Neg", "Max", "Min"}


def may_overwrite(result: ir.Value, source: ir.Value) -> bool:
    """Whether ``result`` may be written into the memory of the graph input ``source``.

    ONNX Runtime runs nodes in any order that their edges allow, and knows nothing of memory that an input shares
    with a result. So each node that reads ``source`` must come before the one that writes ``result`` in every such
    order: the writer depends on it. The writer itself may read ``source`` if it works element by element and the two
    have the same shape. The graph must be executed as it stands; an optimizer could take an edge away.
    """
    writer = result.producer()
    if writer is None or source.is_graph_output():
        return False
    reads = any(node is writer for node, _ in source.uses())
    if reads and (writer.op_type not in _ELEMENTWISE or not _same_shape(result, source)):
        return False
    return reads_last(writer, source)


def reads_last(node: ir.Node, source: ir.Value) -> bool:
    """Whether all other readers of the graph input ``source`` come before ``node`` in every order."""
    readers = {reader for reader, _ in source.uses()} - {node}
    return readers <= _ancestors(node)


def _same_shape(result: ir.Value, source: ir.Value) -> bool:
    shape = source.shape
    return shape is not None and shape.is_static() and result.shape == shape


def _ancestors(node: ir.Node) -> set[ir.Node]:
    found: set[ir.Node] = set()
    pending = [node]
    while pending:
        for value in pending.pop().inputs:
            producer = value.producer() if value is not None else None
            if producer is not None and producer not in found:
                found.add(producer)
                pending.append(producer)
    return found
