"""Gradients of a training model that some other tool has made, by this package.

The operators of such gradients are known to builds of ONNX Runtime for training only, so the part that computes the
outputs is taken and differentiated again.
"""

from __future__ import annotations

import onnx
from onnx import helper

from lightning_ort.errors import UnsupportedError
from lightning_ort.ondevice.ort_training.names import DOMAIN
from lightning_ort.ondevice.state import TrainingState
from lightning_ort.ondevice.step_graph import StepGraph
from lightning_ort.onnx_gradients.inputs import input_infos
from lightning_ort.onnx_gradients.joint import GRAD, NEW, trace_joint
from lightning_ort.onnx_gradients.writing import written
from lightning_ort.onnx_reader import to_torch
from lightning_ort.runtime.dtypes import ONNX

__all__ = ["derived", "forward_part", "is_foreign"]

# results that only their gradients read
_PLAIN = {
    (DOMAIN, "BatchNormInternal"): ("BatchNormalization", 3, {"training_mode": 1}),
    ("", "LayerNormalization"): ("LayerNormalization", 1, {}),
}


def is_foreign(model: onnx.ModelProto) -> bool:
    """Whether a graph has operators that are not ONNX's own."""
    return any(node.domain not in ("", "ai.onnx") for node in model.graph.node)


def derived(model: onnx.ModelProto, state: TrainingState) -> StepGraph:
    """Outputs of ``model``, the gradients of the first, and new running statistics.

    Args:
        model: a training model without the operators that accumulate; its outputs are those that users get.
        state: its tensors.

    Raises:
        UnsupportedError: an operator that cannot be read or has no gradient, with its node.
    """
    forward = forward_part(model, state)
    outputs = [o.name for o in forward.graph.output]
    infos = input_infos(forward)
    module = to_torch(forward, list(state.trained))
    joint = trace_joint(module, infos, outputs[:1], [], list(state.trained), statistics=True)
    graph = written(joint, forward, fed=state.tensors)
    read = {str(v.name) for v in graph.graph.inputs}
    changed = [name for name in state.tensors if f"{name}{NEW}" in joint.results]
    return StepGraph(
        graph,
        tuple(infos),
        tuple(outputs),
        {name: name for name in state.tensors if name in read},
        {name: f"{name}{GRAD}" for name in state.trained},
        {name: f"{name}{NEW}" for name in changed},
    )


def forward_part(model: onnx.ModelProto, state: TrainingState) -> onnx.ModelProto:
    """What the outputs of ``model`` need, with the tensors of ``state`` as initializers.

    Raises:
        UnsupportedError: that part reads a sum of gradients.
    """
    graph = onnx.GraphProto(name=model.graph.name)
    needed = {o.name for o in model.graph.output}
    kept = []
    for node in reversed(model.graph.node):
        if needed.isdisjoint(node.output):
            continue
        kept.append(_plain(node, needed))
        needed.update(i for i in kept[-1].input if i)
    graph.node.extend(reversed(kept))
    graph.output.extend(model.graph.output)
    produced = {o for node in kept for o in node.output}
    graph.initializer.extend(i for i in model.graph.initializer if i.name in needed)
    produced.update(i.name for i in graph.initializer)
    for name, tensor in state.tensors.items():
        if name in needed:
            # a few bytes are enough: the values are inputs of what is made of this
            graph.initializer.append(
                helper.make_tensor(name, int(ONNX[tensor.dtype]), tensor.shape, tensor.numpy().tobytes(), raw=True)
            )
            produced.add(name)
    for value in model.graph.input:
        if value.name not in state.tensors:
            graph.input.append(value)
            produced.add(value.name)
    missing = sorted(needed - produced)
    if missing:
        raise UnsupportedError(f"The training model reads {', '.join(missing)}, which nothing gives it.")
    found = onnx.ModelProto(ir_version=model.ir_version, graph=graph)
    domains = {n.domain or "" for n in kept} | {""}
    found.opset_import.extend(i for i in model.opset_import if i.domain in domains)
    return found


def _plain(node: onnx.NodeProto, needed: set[str]) -> onnx.NodeProto:
    """``node`` as an operator of ONNX's own, with the outputs that it has."""
    row = _PLAIN.get((node.domain, node.op_type))
    if row is None:
        return node
    op_type, outputs, attributes = row
    lost = [o for o in node.output[outputs:] if o in needed]
    if lost:
        raise UnsupportedError(f"{node.op_type} (node {node.name!r}): output {lost[0]!r} cannot be read.")
    copy = helper.make_node(op_type, node.input, node.output[:outputs], name=node.name)
    known = {"epsilon", "momentum", "axis", "stash_type"}
    copy.attribute.extend(a for a in node.attribute if a.name in known)
    copy.attribute.extend(helper.make_attribute(k, v) for k, v in attributes.items())
    return copy
