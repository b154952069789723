"""The graph of a step and the updates of its gradients as one ONNX model, for reading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper
from torch import Tensor

from lightning_ort.updates.graph import Slot, UpdateGraph
from lightning_ort.updates.pieces import Part, pieces_of

if TYPE_CHECKING:
    from lightning_ort.trainer.optimizer import Optimizer

__all__ = ["with_updates"]


def with_updates(step: onnx.ModelProto, optimizer: Optimizer, gradients: Mapping[str, Tensor]) -> onnx.ModelProto:
    """``step`` followed by the update of every weight whose gradient it gives.

    The updates are those that run, but for the cutting and joining of tensors: one weight is one tensor here.

    Args:
        step: a graph with outputs ``<weight>_grad``.
        optimizer: whose updates are meant.
        gradients: name to gradient.
    """
    given = {value.name for value in step.graph.output}
    names = [name for name in gradients if f"{name}_grad" in given]
    merged = onnx.ModelProto()
    merged.CopyFrom(step)
    if not names:
        return merged
    sizes, groups = [gradients[n].numel() for n in names], optimizer.groups_of(names)
    dtypes = {g: gradients[n].dtype for g, n in zip(groups, names, strict=True)}
    ordered = [dtypes[g] for g in range(len(dtypes))]
    pieces = pieces_of(sizes, groups, elementwise=False)
    update = UpdateGraph(optimizer.rule, pieces, ordered, clip=optimizer.clip, guard=optimizer.guard)
    proto = ir.to_proto(update.model)
    _prefix(proto, "update/")
    types = {v.name: v.type.tensor_type.elem_type for v in [*proto.graph.input, *proto.graph.output]}
    graph = merged.graph
    inputs = {value.name for value in graph.input}
    nodes: list[Any] = []
    for slot, value in zip(update.inputs, proto.graph.input, strict=True):
        source = _name(slot, names, optimizer.rule.coefficients)
        if not isinstance(slot.where, Part):
            graph.input.append(helper.make_tensor_value_info(value.name, types[value.name], []))
            continue
        if slot.what != "grad" and source not in inputs:
            shape = list(gradients[names[slot.where.param]].shape)
            graph.input.append(helper.make_tensor_value_info(source, types[value.name], shape))
            inputs.add(source)
        nodes.append(helper.make_node("Reshape", [source, "update/flat"], [value.name]))
    nodes += proto.graph.node
    for slot, value in zip(update.outputs, proto.graph.output, strict=True):
        target = f"{_name(slot, names, optimizer.rule.coefficients)}_updated" if slot.what != "finite" else "all_finite"
        shape = list(gradients[names[slot.where.param]].shape) if isinstance(slot.where, Part) else []
        constant = f"{target}/shape"
        graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), constant))
        nodes.append(helper.make_node("Reshape", [value.name, constant], [target]))
        graph.output.append(helper.make_tensor_value_info(target, types[value.name], shape))
    graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), "update/flat"))
    graph.initializer.extend(proto.graph.initializer)
    graph.node.extend(nodes)
    return merged


def _name(slot: Slot, names: list[str], coefficients: tuple[str, ...]) -> str:
    if not isinstance(slot.where, Part):
        return str(slot.what)
    name = names[slot.where.param]
    if slot.what == "param":
        return name
    return f"{name}_grad" if slot.what == "grad" else f"{name}/Moment_{int(slot.what) + 1}"


def _prefix(model: onnx.ModelProto, prefix: str) -> None:
    """Give all values and nodes names that no other graph has."""
    graph = model.graph
    for value in [*graph.input, *graph.output, *graph.value_info, *graph.initializer]:
        value.name = prefix + value.name
    for node in graph.node:
        node.name = prefix + node.name
        for values in (node.input, node.output):
            values[:] = [name and prefix + name for name in values]
