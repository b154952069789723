"""What an ONNX value name stands for while a graph is read, and ONNX data as Python and torch data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import fx

from lightning_ort.runtime.tensors import TORCH

__all__ = [
    "Computed",
    "Constant",
    "Number",
    "Value",
    "attributes_of",
    "bodies",
    "dtype_from",
    "label_of",
    "subgraphs",
    "tensor_from",
]


@dataclasses.dataclass(frozen=True)
class Constant:
    """A tensor known when the graph is read."""

    tensor: torch.Tensor
    initializer: str | None = None
    """its name in the file, when it has one"""


@dataclasses.dataclass(frozen=True)
class Number:
    """A number (rank 0) or a list of numbers (rank 1) computed from sizes; Python numbers at run time."""

    node: fx.Node
    dtype: torch.dtype
    rank: int
    of_sizes: bool = False
    """it is how many sizes there are, so that what is made with it is as long as a list of sizes"""
    length: int | None = None
    """number of entries of a list, where the graph tells"""


@dataclasses.dataclass(frozen=True)
class Computed:
    """A tensor, or a sequence of them."""

    node: fx.Node


Value: TypeAlias = Constant | Number | Computed


def dtype_from(onnx_type: int) -> torch.dtype:
    """Torch's element type for a ``TensorProto.DataType``.

    Raises:
        ValueError: torch has none (strings, 4-bit and 8-bit floats).
    """
    if onnx_type not in TORCH:
        raise ValueError(f"element type {onnx.TensorProto.DataType.Name(onnx_type)} has no torch counterpart here")
    return TORCH[onnx_type]


def tensor_from(proto: onnx.TensorProto) -> torch.Tensor:
    """A torch tensor of its own memory."""
    dtype = dtype_from(proto.data_type)
    array = np.array(numpy_helper.to_array(proto))
    if dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Attributes as Python values: element types as torch's, tensors of one element as ``(number, dtype)``."""
    found: dict[str, Any] = {}
    for attribute in node.attribute:
        value = onnx.helper.get_attribute_value(attribute)
        if attribute.type == onnx.AttributeProto.STRING:
            value = value.decode()
        elif attribute.type == onnx.AttributeProto.STRINGS:
            value = [v.decode() for v in value]
        elif attribute.type == onnx.AttributeProto.TENSOR:
            tensor = tensor_from(value)
            value = (tensor.item(), tensor.dtype) if tensor.numel() == 1 else tensor
        elif attribute.type in (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS):
            value = list(value)
        elif attribute.name in ("to", "dtype"):
            value = dtype_from(value)
        found[attribute.name] = value
    return found


def bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The branches or the body of ``node``."""
    return [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]


def subgraphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The branches and bodies in ``graph``, and those in them."""
    for node in graph.node:
        for body in bodies(node):
            yield body
            yield from subgraphs(body)


def label_of(node: onnx.NodeProto) -> str:
    """How a node is called in errors."""
    return f"{node.op_type} (node {node.name or node.output[0]!r})"
