"""An update graph as a part of a larger ONNX graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from lightning_ort.updates.graph import Slot, UpdateGraph
from lightning_ort.updates.pieces import Part

__all__ = ["append_update"]

_PREFIX = "apply_update/"


def append_update(
    graph: onnx.GraphProto,
    update: UpdateGraph,
    shapes: Sequence[Sequence[int]],
    sources: Mapping[Slot, str],
    target: Callable[[Slot], str],
) -> None:
    """Add the nodes of ``update``, whose tensors are flat, and its results as outputs of the shapes of the parameters.

    Args:
        graph: gets the nodes; must define the values ``sources``.
        update: made of one piece per parameter.
        shapes: per parameter.
        sources: for each input of ``update`` the value that it reads.
        target: name of the output for a result.
    """
    proto = ir.to_proto(update.model).graph
    for value in [*proto.input, *proto.output, *proto.initializer]:
        value.name = _PREFIX + value.name
    for node in proto.node:
        node.name = _PREFIX + node.name
        for values in (node.input, node.output):
            values[:] = [name and _PREFIX + name for name in values]
    nodes: list[onnx.NodeProto] = []
    for slot, value in zip(update.inputs, proto.input, strict=True):
        if isinstance(slot.where, Part):
            nodes.append(helper.make_node("Reshape", [sources[slot], f"{_PREFIX}flat"], [value.name]))
        else:
            nodes.append(helper.make_node("Identity", [sources[slot]], [value.name]))
    nodes += proto.node
    for slot, value in zip(update.outputs, proto.output, strict=True):
        shape = list(shapes[slot.where.param]) if isinstance(slot.where, Part) else []
        name = target(slot)
        graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), f"{name}/shape"))
        nodes.append(helper.make_node("Reshape", [value.name, f"{name}/shape"], [name]))
        graph.output.append(helper.make_tensor_value_info(name, value.type.tensor_type.elem_type, shape))
    graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), f"{_PREFIX}flat"))
    graph.initializer.extend(proto.initializer)
    graph.node.extend(nodes)
