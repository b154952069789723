"""A step's graph as ONNX Runtime's training API wants it: ``training_model.onnx`` and ``eval_model.onnx``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx
import onnx_ir as ir
from onnx import helper

from lightning_ort.checkpoints.state import TrainingState
from lightning_ort.compiler.aot.emit import written
from lightning_ort.compiler.aot.inputs import input_infos
from lightning_ort.compiler.aot.joint import GRAD, NEW, trace_joint
from lightning_ort.compiler.aot.step_graph import StepGraph
from lightning_ort.errors import UnsupportedError
from lightning_ort.ondevice.formats.ort_training.names import BUFFER, DOMAIN, OUT, RESET, TRAINING_OPSET
from lightning_ort.ondevice.names import check_names
from lightning_ort.onnx_reader import to_torch
from lightning_ort.optim.update.update import reads_last
from lightning_ort.runtime.tensors import ONNX
from lightning_ort.validation import listed

__all__ = ["derived", "evaluation_model", "is_foreign", "training_model"]


def evaluation_model(step: StepGraph, state: TrainingState) -> ir.Model:
    """The graph of ``step`` with the inputs that the API feeds: the user's, then all tensors of ``state``.

    Raises:
        ValueError: a tensor has a name that the API understands otherwise.
    """
    return _Arranged(step, state).model


def training_model(step: StepGraph, state: TrainingState) -> ir.Model:
    """The same with a sum of gradients per trained parameter, and with buffers that are updated in place.

    The operator ``InPlaceAccumulatorV2`` adds a value to its first input or replaces it, in the memory of that input.
    It is the only one by which a graph can change what the API keeps, so running statistics go through it as well.

    Raises:
        ValueError: a tensor has a name that the API understands otherwise.
        UnsupportedError: a gradient that is not float32, or a buffer whose old value may be read too late.
    """
    arranged = _Arranged(step, state)
    model, graph, outputs = arranged.model, arranged.model.graph, arranged.outputs
    buffers, told = [], []
    reset = ir.Value(name=RESET, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([1]))
    for name, output in step.gradients.items():
        gradient, tensor = outputs[output], state.parameters.get(name)
        dtype, shape = gradient.dtype, gradient.shape  # of an input of users
        if tensor is not None:
            dtype, shape = ONNX[tensor.dtype], ir.Shape(list(tensor.shape))
        if dtype != ir.DataType.FLOAT:
            raise UnsupportedError(
                f"{name!r} is {dtype}; ONNX Runtime's optimizers update float32 only. Use flavour='portable', or "
                "convert the module with .float()."
            )
        buffer = ir.Value(name=f"{name}{BUFFER}", type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
        buffers.append(buffer)
        told.append(_accumulator(graph, name, buffer, gradient, reset))
    for name, output in step.updates.items():
        old, new = arranged.inputs[name], outputs[output]
        if old.dtype != ir.DataType.FLOAT:
            raise UnsupportedError(f"Buffer {name!r} is {old.dtype}; ONNX Runtime's accumulator takes float32 only.")
        if name in arranged.counters:
            new = _node(graph, "Cast", [new], to=int(ir.DataType.FLOAT))
        told.append(_accumulator(graph, name, old, new, _yes(graph)))
        writer = told[-1].producer()
        if old.is_graph_output() or writer is None or not reads_last(writer, old):
            raise UnsupportedError(
                f"Buffer {name!r} is read by an operator that could run after its update; ONNX Runtime's training API "
                "updates it in place. Use flavour='portable'."
            )
    graph.inputs.extend([*buffers, reset])
    graph.outputs[:] = [outputs[o] for o in step.outputs]
    graph.outputs.extend(told)
    model.opset_imports[DOMAIN] = TRAINING_OPSET
    return model


class _Arranged:
    """A copy of a step's model whose inputs are called and ordered as the API wants them.

    Attributes:
        inputs: name of each parameter and buffer to its input.
        outputs: name of each output of the step to its value.
        counters: buffers that are whole numbers in the step, and float32 here.
    """

    def __init__(self, step: StepGraph, state: TrainingState) -> None:
        self.model = ir.from_proto(ir.to_proto(step.model))
        graph = self.model.graph
        self.outputs = {str(v.name): v for v in graph.outputs}
        found = {str(v.name): v for v in graph.inputs}
        users = [i.name for i in step.inputs]
        check_names(dict.fromkeys(state.tensors, "a parameter").get, inputs=users)
        check_names(_meaning, inputs=users, results=step.outputs, parameters=state.parameters, buffers=state.buffers)
        own = {name: found[graph_name] for graph_name, name in step.tensors.items()}
        unknown = sorted(set(found) - set(users) - set(step.tensors))
        assert not unknown, unknown
        _clear_names(graph, {*state.tensors, *(f"{n}{s}" for n in state.tensors for s in (BUFFER, OUT)), RESET}, found)
        self.counters, self.inputs = set[str](), dict[str, ir.Value]()
        for name, tensor in state.tensors.items():
            value = own.get(name) or ir.Value()
            value.name, value.shape = name, ir.Shape(list(tensor.shape))
            value.type = ir.TensorType(ONNX[tensor.dtype])
            if name in state.buffers and not tensor.is_floating_point():
                value = self._counted(value)
            self.inputs[name] = value
        graph.inputs[:] = [*(found[n] for n in users), *self.inputs.values()]

    def _counted(self, value: ir.Value) -> ir.Value:
        """A float32 input in place of ``value``, which becomes a whole number."""
        graph, name, whole = self.model.graph, str(value.name), value.dtype
        assert whole is not None
        entry = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=value.shape)
        value.name = f"{name}_whole"
        users = list(value.uses())
        if users:
            node = ir.node("Cast", [entry], attributes={"to": int(whole)})
            graph.insert_before(graph[0], node)
            node.outputs[0].name = value.name
            for user, position in users:
                user.replace_input_with(position, node.outputs[0])
        self.counters.add(name)
        return entry


def _meaning(name: str) -> str | None:
    """What ONNX Runtime's training API understands by the name of an input or output."""
    if name.endswith((BUFFER, OUT)):
        return f"the sum of a gradient ({name[name.index('_grad.') :]!r}) in ONNX Runtime's training API"
    return f"what starts sums of gradients anew ({RESET!r})" if name.startswith(RESET) else None


def _clear_names(graph: ir.Graph, taken: set[str], inputs: Mapping[str, ir.Value]) -> None:
    """Rename values inside ``graph`` that are called like something that is to come."""
    inside: Iterable[ir.Value] = [v for node in graph for v in node.outputs if not v.is_graph_output()]
    for value in inside:
        if value.name in taken:
            value.name = f"{value.name}_inside"
    for value in list(graph.initializers.values()):
        if value.name in taken and value.name not in inputs:
            del graph.initializers[str(value.name)]
            value.name = f"{value.name}_inside"
            graph.register_initializer(value)


def _node(graph: ir.Graph, op_type: str, inputs: list[ir.Value], domain: str = "", **attributes: int) -> ir.Value:
    node = ir.node(op_type, inputs, attributes=attributes, domain=domain)
    graph.append(node)
    return node.outputs[0]


def _accumulator(graph: ir.Graph, name: str, sum_: ir.Value, value: ir.Value, reset: ir.Value) -> ir.Value:
    told = _node(graph, "InPlaceAccumulatorV2", [sum_, value, reset], DOMAIN)
    told.name = f"{name}{OUT}"
    told.type, told.shape = ir.TensorType(ir.DataType.BOOL), ir.Shape([1])
    return told


def _yes(graph: ir.Graph) -> ir.Value:
    name = f"{RESET}_always"
    if name not in graph.initializers:
        value = ir.Value(name=name, const_value=ir.tensor([True], dtype=ir.DataType.BOOL, name=name))
        graph.register_initializer(value)
    return graph.initializers[name]


# results that only their gradients read
_PLAIN = {
    (DOMAIN, "BatchNormInternal"): ("BatchNormalization", 3, {"training_mode": 1}),
    ("", "LayerNormalization"): ("LayerNormalization", 1, {}),
}


def is_foreign(model: onnx.ModelProto) -> bool:
    """Whether a graph has operators that are not ONNX's own."""
    return any(node.domain not in ("", "ai.onnx") for node in model.graph.node)


def derived(model: onnx.ModelProto, state: TrainingState, inputs: Sequence[str] = ()) -> StepGraph:
    """Outputs of ``model``, the gradients of the first, and new running statistics.

    Args:
        model: a training model without the operators that accumulate; its outputs are those that users get.
        state: its tensors.
        inputs: inputs of users by which it is differentiated as well.

    Raises:
        UnsupportedError: an operator that cannot be read or has no gradient, with its node; or a running statistic
            that is not in ``state``.
    """
    forward = _forward_part(model, state)
    outputs = [o.name for o in forward.graph.output]
    infos = input_infos(forward)
    module = to_torch(forward, list(state.trained))
    wanted = [*inputs, *state.trained]
    joint = trace_joint(module, infos, outputs[:1], [], wanted, statistics=True)
    lost = [name for name in joint.updates if name not in state.tensors]
    if lost:
        raise UnsupportedError(
            f"Training changes {listed(map(repr, lost))}, which its checkpoint does not have. Name these running "
            "statistics in frozen_params of generate_artifacts; in a block, say requires_grad(name, False)."
        )
    graph = written(joint, forward, fed=state.tensors)
    read = {str(v.name) for v in graph.graph.inputs}
    changed = [name for name in state.tensors if f"{name}{NEW}" in joint.results]
    return StepGraph(
        graph,
        tuple(joint.infos),
        tuple(outputs),
        {name: name for name in state.tensors if name in read},
        {name: f"{name}{GRAD}" for name in wanted},
        {name: f"{name}{NEW}" for name in changed},
    )


def _forward_part(model: onnx.ModelProto, state: TrainingState) -> onnx.ModelProto:
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
