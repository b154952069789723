"""Gradients and their update as one graph, or the update as a graph of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import helper, numpy_helper
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_ort.checkpoints.portable import LEARNING_RATE, NEW, STEP, moment_name
from lightning_ort.checkpoints.state import TrainingState
from lightning_ort.compiler import decompositions
from lightning_ort.compiler.aot.joint import GRAD
from lightning_ort.compiler.aot.step_graph import StepGraph
from lightning_ort.compiler.lowering import GraphBuilder
from lightning_ort.compiler.passes import optimize, standardize
from lightning_ort.ondevice.optimizer_config import OptimizerConfig
from lightning_ort.optim.update.graph import Part, Slot, UpdateGraph, append_update, pieces_of
from lightning_ort.runtime.tensors import ONNX

__all__ = ["gradients_model", "train_step_model", "update_model"]


def gradients_model(train: StepGraph) -> ir.Model:
    """``train`` with its new buffers called as all that is fed back is called."""
    model = train.model.clone()
    values = {str(v.name): v for v in model.graph.outputs}
    for name, output in train.updates.items():
        values[output].name = f"{NEW}{name}"
    return model


def train_step_model(train: StepGraph, state: TrainingState, config: OptimizerConfig) -> ir.Model:
    """One run: results, new parameters, new buffers, new optimizer states."""
    model = gradients_model(train)
    gradients = set(train.gradients.values())
    kept = [v for v in model.graph.outputs if v.name not in gradients]
    model.graph.outputs.clear()
    model.graph.outputs.extend(kept)
    proto = ir.to_proto(model)
    present = {i.name for i in proto.graph.input}
    missing = {n: state.parameters[n] for n in state.trained if n not in present}
    proto.graph.input.extend(_value(n, t.dtype, t.shape) for n, t in missing.items())
    return _with_update(proto, state, config)


def update_model(state: TrainingState, config: OptimizerConfig) -> ir.Model:
    """From parameters, gradients and optimizer states to new parameters and states."""
    trained = {n: state.parameters[n] for n in state.trained}
    inputs = [_value(n, t.dtype, t.shape) for n, t in trained.items()]
    inputs += [_value(f"{n}{GRAD}", t.dtype, t.shape) for n, t in trained.items()]
    graph = helper.make_graph([], "update", inputs, [])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    proto.producer_name = "lightning_ort"
    return _with_update(proto, state, config)


def _with_update(proto: onnx.ModelProto, state: TrainingState, config: OptimizerConfig) -> ir.Model:
    graph, names = proto.graph, list(state.trained)
    tensors = [state.parameters[n] for n in names]
    dtypes = list(dict.fromkeys(t.dtype for t in tensors))
    groups = [dtypes.index(t.dtype) for t in tensors]
    pieces = pieces_of([t.numel() for t in tensors], groups, elementwise=False)
    limit = config.clip_grad_norm
    update = UpdateGraph(config.rule, pieces, dtypes, clip=limit is not None, guard=False)
    for name, tensor in zip(names, tensors, strict=True):
        graph.input.extend(_value(moment_name(s, name), tensor.dtype, tensor.shape) for s in config.states)
    graph.input.append(_value(STEP, torch.int64, ()))
    graph.input.append(_value(LEARNING_RATE, torch.float32, ()))
    numbers = _append_numbers(graph, config, dtypes)
    sources: dict[Slot, str] = {}
    for slot, value in zip(update.inputs, update.model.graph.inputs, strict=True):
        assert value.dtype is not None
        if isinstance(slot.where, Part):
            sources[slot] = _name(slot, names, config.states)
        elif slot.what == "coefficient":
            assert isinstance(slot.where, tuple)
            sources[slot] = numbers[slot.where]
        else:
            number = 1.0 if slot.what == "scale" else limit
            sources[slot] = f"optimizer/{value.name}"
            graph.initializer.append(numpy_helper.from_array(np.array(number, value.dtype.numpy()), sources[slot]))
    shapes = [t.shape for t in tensors]
    append_update(graph, update, shapes, sources, lambda slot: f"{NEW}{_name(slot, names, config.states)}")
    graph.output.append(_value(f"{NEW}{STEP}", torch.int64, ()))
    return standardize(ir.from_proto(proto))


def _name(slot: Slot, names: Sequence[str], states: Sequence[str]) -> str:
    assert isinstance(slot.where, Part)
    name = names[slot.where.param]
    if slot.what == "param":
        return name
    return f"{name}{GRAD}" if slot.what == "grad" else moment_name(states[int(slot.what)], name)


def _append_numbers(
    graph: onnx.GraphProto, config: OptimizerConfig, dtypes: Sequence[torch.dtype]
) -> Mapping[tuple[int, int], str]:
    """Nodes that compute the coefficients of the rule from learning rate and step, in float64; names by slot.

    In float32, 1 minus a power of 0.999 would have lost half of its digits.
    """
    constants: dict[int, float] = {}
    places: list[int] = []

    def computed(lr: Tensor, step: Tensor) -> list[Tensor]:
        values = config.numbers(lr.double(), (step + 1).double())
        constants.update({k: float(v) for k, v in enumerate(values) if not isinstance(v, Tensor)})
        places.extend(k for k, v in enumerate(values) if isinstance(v, Tensor))
        tensors = [v for v in values if isinstance(v, Tensor)]
        return [step + 1, *(v.to(dtype) for dtype in dtypes for v in tensors)]

    with FakeTensorMode():
        rate, step = torch.empty(()), torch.empty((), dtype=torch.int64)
        table = decompositions.table()
        traced = make_fx(computed, decomposition_table=table, _allow_non_fake_inputs=True)(rate, step).graph
    builder = GraphBuilder()
    for node in traced.nodes:
        if node.op == "placeholder":
            builder.add_input(node)
        elif node.op == "call_function":
            builder.lower(node)
    results = traced.output_node().args[0]
    model = optimize(builder.model(list(results)))
    order = [LEARNING_RATE, STEP]
    renamed = {v.name: name for v, name in zip(builder.inputs, order, strict=True)}
    for value in model.graph.inputs:
        value.name = renamed[value.name]
    prefix = "optimizer/numbers/"
    for node in model.graph:
        node.name = f"{prefix}{node.name}"
        for value in node.outputs:
            value.name = f"{prefix}{value.name}"
    for value in list(model.graph.initializers.values()):
        del model.graph.initializers[str(value.name)]
        value.name = f"{prefix}{value.name}"
        model.graph.register_initializer(value)
    outputs = list(model.graph.outputs)
    outputs[0].name = f"{NEW}{STEP}"
    names: dict[tuple[int, int], str] = {}
    for group in range(len(dtypes)):
        for i, k in enumerate(places):
            names[group, k] = str(outputs[1 + group * len(places) + i].name)
        for k, number in constants.items():
            names[group, k] = f"{prefix}constant_{group}_{k}"
            array = np.array(number, ONNX[dtypes[group]].numpy())
            graph.initializer.append(numpy_helper.from_array(array, names[group, k]))
    proto = ir.to_proto(model).graph
    graph.initializer.extend(proto.initializer)
    graph.node.extend(proto.node)
    return names


def _value(name: str, dtype: torch.dtype, shape: Sequence[int]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, int(ONNX[dtype]), list(shape))
