"""The model that blocks work on, and what they add to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

__all__ = [
    "ModelAccessor",
    "add_initializer",
    "add_input_like",
    "add_node",
    "base",
    "current",
    "custom_op_library",
    "empty_base",
    "is_used",
    "number",
    "without_values",
]

_IR_VERSION, _OPSET = 10, 20
"""of models that are made here: what every ONNX Runtime from 1.19 on reads"""

_LARGE = 1 << 10
"""Elements from which the values of an initializer are kept from the checker, which could not hold them all."""


class ModelAccessor:
    """The model that blocks work on, between :func:`~lightning_ort.ondevice.onnxblock.base` and its end.

    Attributes:
        model: the model; blocks change it.
        made: names of the initializers that blocks made to be trained.
        depth: how many blocks are being built, one inside the other.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.made: list[str] = []
        self.depth = 0
        self._count = 0

    def new_name(self, token: str) -> str:
        """A name that no value and no node of the model has: ``onnx::<token>::<number>``."""
        graph = self.model.graph
        taken = {v.name for v in (*graph.input, *graph.output, *graph.initializer, *graph.value_info)}
        for node in graph.node:
            taken.update((node.name, *node.input, *node.output))
        while True:
            self._count += 1
            name = f"onnx::{token}::{self._count}"
            if name not in taken:
                return name

    def import_opset(self, domain: str) -> None:
        """Let the model have operators of ``domain``, in its first version that has what blocks make."""
        if all(i.domain != domain for i in self.model.opset_import):
            self.model.opset_import.append(helper.make_opsetid(domain, {"ai.onnx.ml": 2}.get(domain, 1)))


_accessor: ModelAccessor | None = None


def current() -> ModelAccessor:
    """The accessor in whose context a block is called.

    Raises:
        RuntimeError: there is none.
    """
    if _accessor is None:
        raise RuntimeError("A block was called without a model. Call it within `with onnxblock.base(model):`.")
    return _accessor


@contextlib.contextmanager
def _registered(model: onnx.ModelProto) -> Iterator[ModelAccessor]:
    global _accessor
    if _accessor is not None:
        raise RuntimeError("There is a base model already; end its context before another one begins.")
    _accessor = ModelAccessor(model)
    try:
        yield _accessor
    finally:
        _accessor = None


@contextlib.contextmanager
def base(model: onnx.ModelProto, model_path: str | os.PathLike[str] | None = None) -> Iterator[ModelAccessor]:
    """Let blocks work on a copy of ``model``.

    Args:
        model: of opset 13 to 26 where gradients are wanted.
        model_path: of a file whose external data ``model`` lacks; it is read then.

    Yields:
        The accessor, whose ``model`` is what the blocks have made.

    Raises:
        RuntimeError: contexts are nested.
        TypeError: ``model`` is no ``onnx.ModelProto``.
    """
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(
            f"model is a {type(model).__name__}; expected an onnx.ModelProto, or use onnxblock.empty_base()."
        )
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if model_path is not None:
        onnx.external_data_helper.load_external_data_for_model(copy, str(Path(model_path).parent))
    with _registered(copy) as accessor:
        yield accessor


@contextlib.contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[ModelAccessor]:
    """Let blocks work on a new model, of opset 20 by default."""
    graph = onnx.GraphProto(name="graph")
    opsets = [helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("", opset_version or _OPSET)]
    model = onnx.ModelProto(ir_version=_IR_VERSION, producer_name="lightning_ort", graph=graph, opset_import=opsets)
    with _registered(model) as accessor:
        yield accessor


@contextlib.contextmanager
def custom_op_library(custom_op_library_path: str | os.PathLike[str]) -> Iterator[Path]:
    """Say that models have operators of a library.

    ``ForwardBlock`` leaves such operators in the model as they are. Their gradients are known to nobody, so that
    ``TrainingBlock`` refuses them, named, with the library or without it.

    Raises:
        FileNotFoundError: there is no such library.
    """
    path = Path(custom_op_library_path)
    if not path.exists():
        raise FileNotFoundError(f"There is no library of custom operators {str(path)!r}.")
    yield path


def without_values(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` with inputs in the place of large initializers."""
    graph = onnx.GraphProto(name=model.graph.name or "graph")
    for field in ("node", "input", "output", "value_info", "sparse_initializer", "quantization_annotation"):
        getattr(graph, field).extend(getattr(model.graph, field))
    given = {i.name for i in graph.input}
    for initializer in model.graph.initializer:
        if np.prod(initializer.dims, dtype=np.int64) < _LARGE:
            graph.initializer.append(initializer)
        elif initializer.name not in given:
            graph.input.append(
                helper.make_tensor_value_info(initializer.name, initializer.data_type, list(initializer.dims))
            )
    light = onnx.ModelProto(ir_version=model.ir_version, graph=graph, functions=model.functions)
    light.opset_import.extend(model.opset_import)
    return light


def add_node(
    op_type: str, inputs: Sequence[str], output: str | None = None, *, name: str | None = None, domain: str = "",
    **attributes: Any,
) -> str:  # fmt: skip
    """Add a node with one result to the base model; the name of that.

    Args:
        output: what the name of the result is made of; by default the operator in lower case.
        name: what the name of the node is made of; by default the operator.
        attributes: ``None`` for those that are left out.
    """
    accessor = current()
    if domain:
        accessor.import_opset(domain)
    result = accessor.new_name(output or f"{op_type.lower()}_output")
    given = {k: v for k, v in attributes.items() if v is not None}
    accessor.model.graph.node.append(
        helper.make_node(
            op_type, list(inputs), [result], name=accessor.new_name(name or op_type), domain=domain or None, **given
        )
    )
    return result


def add_initializer(token: str, values: np.ndarray) -> str:
    """Add an initializer to the base model; its name."""
    accessor = current()
    name = accessor.new_name(token)
    accessor.model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
    return name


def number(token: str, value: float) -> str:
    """Add a float32 initializer of shape [1] to the base model; its name."""
    return add_initializer(token, np.array([value], np.float32))


def add_input_like(like: str, name: str) -> onnx.ValueInfoProto:
    """Add an input called ``name`` to the base model, declared like the input or output ``like``.

    Raises:
        LookupError: there is none.
    """
    graph = current().model.graph
    known = [v for v in (*graph.input, *graph.output) if v.name == like]
    if not known:
        names = ", ".join(v.name for v in (*graph.input, *graph.output))
        raise LookupError(f"{like!r} is no input and no output of the model; it has {names}.")
    added = graph.input.add()
    added.CopyFrom(known[0])
    added.name = name
    return added


def is_used(name: str) -> bool:
    """Whether the base model has an input of that name, or a node that reads or gives such a value."""
    graph = current().model.graph
    return any(i.name == name for i in graph.input) or any(name in (*n.input, *n.output) for n in graph.node)
