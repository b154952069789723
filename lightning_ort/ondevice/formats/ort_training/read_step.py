"""``training_model.onnx`` and ``eval_model.onnx`` as graphs that any ONNX Runtime runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import onnx
import onnx_ir as ir
import torch

from lightning_ort.checkpoints.state import TrainingState
from lightning_ort.compiler.aot.inputs import InputInfo, input_infos
from lightning_ort.compiler.aot.step_graph import StepGraph
from lightning_ort.compiler.passes import optimize
from lightning_ort.errors import UnsupportedError
from lightning_ort.files.onnx_files import read_onnx
from lightning_ort.ondevice.formats.ort_training.names import BUFFER, DOMAIN, RESET
from lightning_ort.ondevice.formats.ort_training.write_step import derived, is_foreign
from lightning_ort.runtime.tensors import ONNX
from lightning_ort.validation import listed

__all__ = ["parsed", "read_evaluation", "read_training"]


def parsed(path: Path) -> onnx.ModelProto:
    """The ONNX file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: something else than an ONNX model, or a truncated one.
    """
    return read_onnx(path)


def read_evaluation(path: Path, state: TrainingState) -> StepGraph:
    """Outputs as a function of the user's inputs and the tensors of ``state``.

    Raises:
        ValueError: the file is no ONNX model, a training model, or its parameters are not those of ``state``.
    """
    file = _File(path, state)
    sums = [str(v.name) for v in file.graph.inputs if v.name == RESET or str(v.name).endswith(BUFFER)]
    if sums:
        raise ValueError(
            f"{str(path)!r} takes {listed(map(repr, sums))}, as training models do; expected an evaluation "
            "model. Are the files of these artifacts mixed up?"
        )
    outputs = tuple(str(v.name) for v in file.graph.outputs)
    return file.step(outputs, {}, {})


def read_training(path: Path, state: TrainingState) -> StepGraph:
    """Outputs, gradients and new buffers: sums in place become plain outputs.

    The tensors of a nominal ``state``, which have no values, get their shapes.

    Raises:
        ValueError: the file is no training model, or not one of the parameters of ``state``.
    """
    file = _File(path, state)
    gradients: dict[str, ir.Value] = {}
    updates: dict[str, ir.Value] = {}
    for node in list(file.graph):
        if node.domain != DOMAIN or node.op_type != "InPlaceAccumulatorV2":
            continue
        sum_, value, _ = node.inputs
        assert sum_ is not None and value is not None
        name = str(sum_.name)
        if name.endswith(BUFFER) and name.removesuffix(BUFFER) in state.trained:
            gradients[name.removesuffix(BUFFER)] = value
        elif name in state.tensors and name not in state.trained:
            updates[name] = value
        else:
            raise ValueError(
                f"{str(path)!r} accumulates into {name!r} (node {node.name!r}), which belongs to no tensor of the "
                "checkpoint. Are they from the same artifacts?"
            )
        file.graph.outputs[:] = [v for v in file.graph.outputs if v is not node.outputs[0]]
        file.graph.remove(node, safe=False)
    missing = [name for name in state.trained if name not in gradients]
    if missing:
        raise ValueError(
            f"{str(path)!r} computes no gradient of {', '.join(missing)}, which the checkpoint says are trained. Is it "
            "the training model of these artifacts?"
        )
    file.graph.inputs[:] = [v for v in file.graph.inputs if v.name != RESET and not str(v.name).endswith(BUFFER)]
    plain = ir.to_proto(file.model)
    if is_foreign(plain):
        try:
            found = dataclasses.replace(derived(plain, file.state), order=file.order)
        except UnsupportedError as error:
            raise UnsupportedError(f"{str(path)!r}: {error}") from error
    else:
        found = file.step(tuple(str(v.name) for v in file.graph.outputs), gradients, updates)
    state.parameters, state.buffers = file.state.parameters, file.state.buffers
    return found


class _File:
    """The graph of a file, whose tensors are checked against a state."""

    def __init__(self, path: Path, state: TrainingState) -> None:
        self.path = path
        self.proto = parsed(path)
        self.model = ir.from_proto(self.proto)
        self.graph = self.model.graph
        self.state = self._completed(state) if state.nominal else state
        self.order = tuple(str(v.name) for v in self.graph.inputs if v.name in state.tensors)
        wrong = []
        for value in self.graph.inputs:
            tensor = self.state.tensors.get(str(value.name))
            if tensor is None or value.shape is None:
                continue
            if not value.shape.is_static() or list(value.shape.numpy()) != list(tensor.shape):
                wrong.append(f"{value.name} is {value.shape} here and {list(tensor.shape)} in the checkpoint")
        if wrong:
            raise ValueError(f"{str(path)!r} does not belong to the checkpoint: {'; '.join(wrong)}.")

    def _completed(self, state: TrainingState) -> TrainingState:
        """A state with zeros in the shapes that the graph declares."""
        declared = {str(v.name): v.shape for v in self.graph.inputs}
        zeros = {}
        for name, tensor in state.tensors.items():
            shape = declared.get(name)
            if shape is None or not shape.is_static():
                raise ValueError(
                    f"{str(self.path)!r} does not say what shape {name!r} has, which the checkpoint, a nominal one, "
                    "does not say either."
                )
            zeros[name] = torch.zeros(list(shape.numpy()), dtype=tensor.dtype)
        parameters = {name: zeros[name] for name in state.parameters}
        return dataclasses.replace(state, parameters=parameters, buffers={name: zeros[name] for name in state.buffers})

    def step(self, outputs: tuple[str, ...], gradients: dict[str, ir.Value], updates: dict[str, ir.Value]) -> StepGraph:
        """The graph with these outputs, and nothing that they do not need."""
        users = self._users()
        updates = self._whole(updates)
        results = {}
        for kind, values in (("grad", gradients), ("new", updates)):
            for name, value in values.items():
                if value.producer() is None or value.is_graph_output():
                    node = ir.node("Identity", [value])
                    self.graph.append(node)
                    copy = node.outputs[0]
                    copy.name, copy.type, copy.shape = f"{name}/{kind}", value.type, value.shape
                    value = copy
                self.graph.outputs.append(value)
                results[kind, name] = str(value.name)
        model = optimize(self.model)
        model.opset_imports.pop(DOMAIN, None)
        read = {str(v.name) for v in model.graph.inputs}
        return StepGraph(
            model,
            tuple(users),
            outputs,
            {name: name for name in self.state.tensors if name in read},
            {name: results["grad", name] for name in gradients},
            {name: results["new", name] for name in updates},
            self.order,
        )

    def _users(self) -> list[InputInfo]:
        infos = input_infos(self.proto)
        own = self.state.tensors
        return [i for i in infos if i.name not in own and i.name != RESET and not i.name.endswith(BUFFER)]

    def _whole(self, updates: dict[str, ir.Value]) -> dict[str, ir.Value]:
        """Buffers that count come in and go out as whole numbers, also where the file has them as float32."""
        found = dict(updates)
        for number, value in enumerate(list(self.graph.inputs)):
            buffer = self.state.buffers.get(str(value.name))
            if buffer is None or ONNX[buffer.dtype] == value.dtype:
                continue
            whole = ONNX[buffer.dtype]
            entry = ir.Value(name=value.name, type=ir.TensorType(whole), shape=value.shape)
            for node in [n for n, _ in value.uses() if _casts_to(n, whole)]:
                for user, position in list(node.outputs[0].uses()):
                    user.replace_input_with(position, entry)
            self.graph.inputs[number] = entry
            self._cast_for(value, entry)
            new = found.get(str(entry.name))
            if new is not None:
                found[str(entry.name)] = self._cast_back(new, whole)
        return found

    def _cast_for(self, value: ir.Value, entry: ir.Value) -> None:
        """Let what still reads ``value`` read ``entry``, cast."""
        uses = [(n, i) for n, i in value.uses() if not (_casts_to(n, entry.dtype) and not n.outputs[0].uses())]
        if uses:
            node = ir.node("Cast", [entry], attributes={"to": int(ir.DataType.FLOAT)})
            node.outputs[0].name = f"{value.name}/float"
            self.graph.insert_before(self.graph[0], node)
            for user, position in uses:
                user.replace_input_with(position, node.outputs[0])
        for user, _ in list(value.uses()):
            self.graph.remove(user, safe=True)

    def _cast_back(self, value: ir.Value, whole: ir.DataType) -> ir.Value:
        node = value.producer()
        if node is not None and node.op_type == "Cast" and node.inputs[0] is not None:
            source = node.inputs[0]
            if source.dtype == whole or (source.producer() is not None and source.dtype is None):
                return source
        cast = ir.node("Cast", [value], attributes={"to": int(whole)})
        self.graph.append(cast)
        cast.outputs[0].name = f"{value.name}/whole"
        cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(whole), value.shape
        return cast.outputs[0]


def _casts_to(node: ir.Node, dtype: ir.DataType | None) -> bool:
    return node.op_type == "Cast" and dtype is not None and node.attributes["to"].as_int() == int(dtype)
