"""Which initializers of an ONNX file are trained."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import numpy as np
import onnx
from onnx import numpy_helper

from lightning_ort.errors import UnsupportedError
from lightning_ort.onnx_reader.exporter_notes import check_copies, is_trained, read_notes, say_unclear
from lightning_ort.onnx_reader.registry import OPERATORS, Operator
from lightning_ort.onnx_reader.values import bodies, subgraphs
from lightning_ort.runtime.tensors import TORCH

__all__ = ["FLOATS", "state_initializers", "trainable_initializers", "weight_initializers"]

FLOATS = {onnx_type for onnx_type, dtype in TORCH.items() if dtype.is_floating_point}
"""Element types of initializers that can be trained."""


def trainable_initializers(model: onnx.ModelProto, settled: Collection[str] = ()) -> list[str]:
    """Names of float initializers that reach an operator where a gradient can reach them.

    Sizes, bounds, scales of resizing, class weights, running statistics, exponents of what may be below zero, and what
    the name tells to be the result of a node ``Constant`` are not among them. Of a file of torch's exporter
    (``dynamo=True``) only what it notes to be parameters counts, weights that it has moved to another place (transposed
    for ``Linear``, reshaped for ``GroupNorm``, joined for ``LSTM``), and what its rewriter has computed from the
    weights of a layer and the batch norm that follows, which has no mark at all.

    Args:
        model: the file.
        settled: names that the user has spoken of; of those that the file does not tell of, these are in the result.

    Raises:
        UnsupportedError: the exporter has computed an initializer from tensors of the module, and the file does not
            say whether they are trained, training it would be something else than training them, or there are several
            of one parameter, which would come apart.
    """
    used = weight_initializers(model)
    floats = {i.name: i for i in model.graph.initializer if i.data_type in FLOATS and i.name in used}
    notes = read_notes(model)
    if notes is None:
        fixed = _fixed_exponents(model) | {name for name in floats if _CONSTANT.fullmatch(name)}
        return [name for name in floats if name not in fixed or name in settled]
    verdicts = {name: is_trained(initializer, notes) for name, initializer in floats.items()}
    unclear = [name for name, trained in verdicts.items() if trained is None]
    open_ = [name for name in unclear if name not in settled]
    if open_:
        raise UnsupportedError(say_unclear(open_, notes))
    trained = [name for name in floats if verdicts[name] or name in unclear]
    check_copies([name for name in trained if name not in settled], notes)
    return trained


def state_initializers(model: onnx.ModelProto) -> list[str]:
    """Names of initializers that a training run changes: running statistics."""
    state = set(_states(model.graph, {}))
    return [i.name for i in model.graph.initializer if i.name in state]


def _states(graph: onnx.GraphProto, same: dict[str, str]) -> Iterator[str]:
    """Each value that an operator changes.

    Args:
        same: the result of an ``Identity`` outside, to what it is.
    """
    same = dict(same)
    for node in graph.node:
        if node.op_type == "Identity" and node.domain in _ONNX:
            same[node.output[0]] = same.get(node.input[0], node.input[0])
        row = _row(node)
        for position, name in enumerate(node.input):
            if name and row is not None and _has(row, position) and row.input_name(position) in row.state:
                yield same.get(name, name)
        for body in bodies(node):
            yield from _states(body, same)


def weight_initializers(model: onnx.ModelProto) -> set[str]:
    """Names of initializers, and of other values, from which a gradient's way leads to a result.

    Operators read them as neither constants nor running statistics, and compute floats of them.
    """
    return _reached(model.graph)


_ONNX = ("", "ai.onnx")

_WITHOUT_GRADIENTS = {
    "And", "ArgMax", "ArgMin", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "NonZero",
    "Not", "Or", "Shape", "Size", "Xor",
}  # fmt: skip


def _reached(graph: onnx.GraphProto) -> set[str]:
    reached = {output.name for output in graph.output}
    for node in reversed(graph.node):
        if reached.isdisjoint(node.output):
            continue
        for body in bodies(node):
            reached |= _reached(body)
        row = _row(node)
        for position, name in enumerate(() if _stops_gradients(node) else node.input):
            if row is None or (_has(row, position) and row.input_name(position) not in row.constants):
                reached.add(name)
    return reached - {""}


def _stops_gradients(node: onnx.NodeProto) -> bool:
    if node.op_type == "Cast":
        return any(a.name == "to" and a.i not in FLOATS for a in node.attribute)
    return node.domain in _ONNX and node.op_type in _WITHOUT_GRADIENTS


def _row(node: onnx.NodeProto) -> Operator | None:
    """What is known of an operator; nothing of those of structure, which hand on what they read."""
    return OPERATORS.get(("" if node.domain == "ai.onnx" else node.domain, node.op_type))


def _has(row: Operator, position: int) -> bool:
    return row.variadic or position < len(row.inputs)


# -- constants that other tools have made initializers of --------------------------------------------------------------

_CONSTANT = re.compile(r"(.*/)?Constant(_\d+)?_output_\d+")
"""The name that torch's older exporter gives the result of a node ``Constant``; parameters have those of the module."""

_NOT_NEGATIVE = {
    "Abs", "Exp", "HardSigmoid", "ReduceL1", "ReduceL2", "ReduceSumSquare", "Relu", "Sigmoid", "Softmax", "Softplus",
    "Sqrt", "ThresholdedRelu",
}  # fmt: skip
"""Operators of which no result is below zero."""

_KEEPING_SIGNS = {
    "Add", "AveragePool", "Cast", "Concat", "Div", "Dropout", "Expand", "Flatten", "Gather", "GlobalAveragePool",
    "GlobalMaxPool", "Identity", "Max", "MaxPool", "Mul", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum",
    "Reshape", "Slice", "Split", "Squeeze", "Sum", "Transpose", "Unsqueeze",
}  # fmt: skip
"""Operators of which no result is below zero where no operand is."""


def _fixed_exponents(model: onnx.ModelProto) -> set[str]:
    """Initializers that are exponents, and have no gradient where a number below zero is raised to their power.

    They are constants: whole numbers from 2 up, since of others there is no such power, and what is trained begins with
    1; unless the graph says that there are no numbers below zero, as before the exponent of a generalized mean.
    """
    numbers = {i.name: i for i in model.graph.initializer if i.data_type in FLOATS}
    found = set()
    for graph in (model.graph, *subgraphs(model.graph)):
        powers = [n for n in graph.node if n.op_type == "Pow" and n.domain in _ONNX and n.input[1] in numbers]
        makers = {name: node for node in graph.node for name in node.output} if powers else {}
        for node in powers:
            exponent = numpy_helper.to_array(numbers[node.input[1]]).astype(np.float64)
            whole = np.all((exponent == np.round(exponent)) & (exponent >= 2))
            if whole and not _is_positive(node.input[0], makers, numbers):
                found.add(node.input[1])
    return found


def _is_positive(
    name: str, makers: dict[str, onnx.NodeProto], numbers: dict[str, onnx.TensorProto], depth: int = 8
) -> bool:
    """Whether the graph says that no entry of a value is below zero."""
    if name in numbers:
        return bool(np.all(numpy_helper.to_array(numbers[name]) >= 0))
    node = makers.get(name)
    if node is None or not depth or node.domain not in _ONNX:
        return False
    if node.op_type == "Constant":
        values = [numpy_helper.to_array(a.t) for a in node.attribute if a.name == "value"]
        return bool(values) and values[0].dtype.kind in "iuf" and bool(np.all(values[0] >= 0))
    if node.op_type in _NOT_NEGATIVE or (node.op_type == "Mul" and node.input[0] == node.input[1]):
        return True
    if node.op_type == "Clip":
        return len(node.input) > 1 and _is_positive(node.input[1], makers, numbers, depth - 1)
    if node.op_type not in _KEEPING_SIGNS:
        return False
    operands = node.input if node.op_type in ("Add", "Concat", "Div", "Max", "Mul", "Sum") else node.input[:1]
    answers = (_is_positive(operand, makers, numbers, depth - 1) for operand in operands)
    return any(answers) if node.op_type == "Max" else all(answers)
