"""ONNX subgraphs that can be written out when a graph is read: branches on constants, loops of a known length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import onnx
import torch

from lightning_ort.errors import UnsupportedError
from lightning_ort.onnx_reader.values import Computed, Constant, Value, attributes_of, label_of, tensor_from

if TYPE_CHECKING:
    from lightning_ort.onnx_reader.build import Reader

__all__ = ["CONTROL_FLOW", "read_if", "read_loop"]

_LONGEST = 1000
"""Iterations that are written out; each is a copy of the loop's body."""


def read_if(reader: Reader, node: onnx.NodeProto) -> None:
    """Read the branch that is taken.

    Raises:
        UnsupportedError: its condition is not constant.
    """
    condition = reader.values[node.input[0]]
    if not isinstance(condition, Constant):
        raise UnsupportedError(
            f"{label_of(node)}: its condition is computed when the graph runs; only a constant condition can be read."
        )
    branch = attributes_of(node)["then_branch" if condition.tensor.item() else "else_branch"]
    for outer, value in zip(node.output, _read(reader, branch), strict=True):
        reader.values[outer] = value


def read_loop(reader: Reader, node: onnx.NodeProto) -> None:
    """Read the body once for each iteration.

    Raises:
        UnsupportedError: how often it runs depends on data, on sizes that are not constant, or is more than a
            thousand times.
    """
    body: onnx.GraphProto = attributes_of(node)["body"]
    limit, condition = (reader.values[name] if name else None for name in node.input[:2])
    carried = [reader.values[name] for name in node.input[2:]]
    most = _constant(node, limit, "its number of iterations", node.input[0])
    goes_on = _constant(node, condition, "its condition", node.input[1])
    names = [i.name for i in body.input]
    scanned: list[list[Value]] = [[] for _ in body.output[1 + len(carried) :]]
    count = 0
    while (most is None or count < most) and goes_on != 0:
        if count == _LONGEST:
            raise UnsupportedError(f"{label_of(node)}: it runs more than {_LONGEST} times.")
        going = Constant(torch.tensor(True)) if condition is None else condition
        reader.values.update(zip(names, [Constant(torch.tensor(count)), going, *carried], strict=True))
        condition, *results = _read(reader, body)
        goes_on = _constant(node, condition, "its condition", body.output[0].name)
        carried, steps = results[: len(carried)], results[len(carried) :]
        for all_of_it, value in zip(scanned, steps, strict=True):
            all_of_it.append(value)
        count += 1
    if scanned and not count:
        raise UnsupportedError(f"{label_of(node)}: it never runs, so that the shape of its results is unknown.")
    stacked = [_stacked(reader, values, node.output[len(carried) + i]) for i, values in enumerate(scanned)]
    for outer, result in zip(node.output, [*carried, *stacked], strict=True):
        if outer:
            reader.values[outer] = result


def _read(reader: Reader, graph: onnx.GraphProto) -> list[Value]:
    """Values of the outputs; the names of a subgraph mean something else each time it is read."""
    before = set(reader.tensors)
    for proto in graph.initializer:
        reader.values[proto.name] = Constant(tensor_from(proto))
    reader.read(graph)
    for name in reader.tensors.keys() - before:
        del reader.tensors[name]
    return [reader.values[output.name] for output in graph.output]


def _constant(node: onnx.NodeProto, value: Value | None, what: str, name: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, Constant):
        raise UnsupportedError(
            f"{label_of(node)}: {what} ({name!r}) is computed when the graph runs; only constants can be read."
        )
    return int(value.tensor)


def _stacked(reader: Reader, values: Sequence[Value], name: str) -> Value:
    constants = [v.tensor for v in values if isinstance(v, Constant)]
    if len(constants) == len(values):
        return Constant(torch.stack(constants))
    tensors = [reader.tensor(value, f"{name} of iteration {i}") for i, value in enumerate(values)]
    return Computed(reader.graph.call_function(torch.stack, (tensors,)))


CONTROL_FLOW = {"If": read_if, "Loop": read_loop}
"""Operator to the function that reads a node of it."""
