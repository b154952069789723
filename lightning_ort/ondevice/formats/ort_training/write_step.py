"""A step's graph as ONNX Runtime's training API wants it: ``training_model.onnx`` and ``eval_model.onnx``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from lightning_ort.errors import UnsupportedError
from lightning_ort.ondevice.ort_training.names import BUFFER, DOMAIN, OUT, RESET, TRAINING_OPSET
from lightning_ort.ondevice.state import TrainingState
from lightning_ort.ondevice.step_graph import StepGraph
from lightning_ort.runtime.dtypes import ONNX
from lightning_ort.updates.inplace import reads_last

__all__ = ["evaluation_model", "training_model"]


def evaluation_model(step: StepGraph, state: TrainingState) -> ir.Model:
    """The graph of ``step`` with the inputs that the API feeds: the user's, then all tensors of ``state``.

    Raises:
        UnsupportedError: an input has a name that the API understands otherwise.
    """
    return _Arranged(step, state).model


def training_model(step: StepGraph, state: TrainingState) -> ir.Model:
    """The same with a sum of gradients per trained parameter, and with buffers that are updated in place.

    The operator ``InPlaceAccumulatorV2`` adds a value to its first input or replaces it, in the memory of that input.
    It is the only one by which a graph can change what the API keeps, so running statistics go through it as well.

    Raises:
        UnsupportedError: a gradient that is not float32, or a buffer whose old value may be read too late.
    """
    arranged = _Arranged(step, state)
    model, graph, outputs = arranged.model, arranged.model.graph, arranged.outputs
    buffers, told = [], []
    reset = ir.Value(name=RESET, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([1]))
    for name in state.trained:
        gradient, tensor = outputs[step.gradients[name]], state.parameters[name]
        if ONNX[tensor.dtype] != ir.DataType.FLOAT:
            raise UnsupportedError(
                f"Parameter {name!r} is {tensor.dtype}; ONNX Runtime's optimizers update float32 only. Use "
                "flavour='portable', or convert the module with .float()."
            )
        buffer = ir.Value(
            name=f"{name}{BUFFER}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(list(tensor.shape))
        )
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
        wrong = [n for n in users if n in state.tensors or n == RESET or n.endswith((BUFFER, OUT))]
        if wrong:
            raise UnsupportedError(
                f"Input {', '.join(map(repr, wrong))} is called like a parameter or like what ONNX Runtime's training "
                "API adds. Rename the inputs."
            )
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
