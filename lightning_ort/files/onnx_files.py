"""ONNX files of others: read by one handle, with what they claim checked before it is believed."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import IO

import numpy as np
import onnx
from onnx import TensorProto, helper

from lightning_ort.errors import DamagedFileError, UnsupportedError
from lightning_ort.files.reading import check_growth, consistent, refusing

__all__ = ["MOST_NODES", "check_count", "check_model", "read_onnx", "read_onnx_checked"]

MOST_NODES = 16_384
"""Nodes of a model when its functions and loops are written out. Beyond, tracing would take many minutes."""

_DAMAGED = "no ONNX model, or a damaged one"

# which field holds the values of which element types, and how many of its entries one element takes
_FIELDS: dict[int, tuple[str, int]] = {
    TensorProto.FLOAT: ("float_data", 1),
    TensorProto.COMPLEX64: ("float_data", 2),
    TensorProto.DOUBLE: ("double_data", 1),
    TensorProto.COMPLEX128: ("double_data", 2),
    TensorProto.INT64: ("int64_data", 1),
    TensorProto.UINT64: ("uint64_data", 1),
    TensorProto.UINT32: ("uint64_data", 1),
    TensorProto.STRING: ("string_data", 1),
}
_PACKED = {t for name, t in TensorProto.DataType.items() if "4" in name.removesuffix("64") or "2E1" in name}


def read_onnx(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """The model of a file, with its external data.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is no ONNX model, damaged, or made to do harm; external data that is missing, or outside of
            the file's folder.
    """
    return read_onnx_checked(path)[0]


def read_onnx_checked(path: str | os.PathLike[str]) -> tuple[onnx.ModelProto, int]:
    """The model of a file, and the CRC-32 of the file (without its external data)."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"There is no ONNX file {str(file)!r}.")

    def read() -> tuple[onnx.ModelProto, int]:
        with refusing(repr(str(file)), _DAMAGED):
            data = file.read_bytes()
            proto = onnx.load_model_from_string(data)
            _load_external(proto, file.parent, len(data))
            check_model(proto)
            return proto, zlib.crc32(data)

    return consistent([file], read)


def check_model(proto: onnx.ModelProto) -> None:
    """Refuse a model whose tensors are not of the sizes that they claim, or with a name of two values or of none.

    Raises:
        DamagedFileError: with the name of the tensor or node.
    """
    if not proto.graph.output:
        raise DamagedFileError("it holds no ONNX graph with outputs")
    for graph in _graphs(proto.graph):
        names = [i.name for i in graph.initializer]
        names += [o for node in graph.node for o in node.output if o]
        if len(set(names)) < len(names):
            seen: set[str] = set()
            twice = next(n for n in names if n in seen or seen.add(n))  # type: ignore[func-returns-value]
            raise DamagedFileError(f"two of its values have the name {twice!r}")
    _check_names(proto.graph)
    for tensor in _tensors(proto):
        if tensor.data_location != TensorProto.EXTERNAL:
            _check_tensor(tensor)


def _check_names(main: onnx.GraphProto) -> None:
    """
    Raises:
        DamagedFileError: a node reads what nothing gives, or nothing gives an output.
    """
    graphs = [*_graphs(main)]
    given = {""}
    for graph in graphs:
        given.update(v.name for v in (*graph.input, *graph.initializer))
        given.update(v.values.name for v in graph.sparse_initializer)
        given.update(name for node in graph.node for name in node.output)
    for graph in graphs:
        for node in graph.node:
            for name in node.input:
                if name not in given:
                    raise DamagedFileError(
                        f"{node.op_type} (node {node.name or node.output[0]!r}) reads {name!r}, which is no input, no "
                        "initializer and no result of another node"
                    )
        for output in graph.output:
            if output.name not in given:
                raise DamagedFileError(f"nothing in it gives its output {output.name!r}")


def check_count(proto: onnx.ModelProto) -> None:
    """Refuse a model of too many nodes to be traced, each function written out where it is called.

    Raises:
        UnsupportedError: there are more than :data:`MOST_NODES`.
        DamagedFileError: a function calls itself.
    """
    functions = {(f.domain, f.name): f for f in proto.functions}
    counts: dict[tuple[str, str], int] = {}
    active: set[tuple[str, str]] = set()

    def count(nodes: Iterator[onnx.NodeProto]) -> int:
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type)
            if key not in functions:
                total += 1
                continue
            if key not in counts:
                if key in active:
                    raise DamagedFileError(f"its function {node.op_type!r} calls itself")
                active.add(key)
                counts[key] = count(_nodes(functions[key]))
                active.discard(key)
            total += counts[key]
        if total > MOST_NODES:
            raise UnsupportedError(
                f"The model has more than {MOST_NODES} nodes; tracing them would take too long. Export a smaller part."
            )
        return total

    count(_nodes(proto.graph))


def _nodes(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in [attribute.g, *attribute.graphs] if attribute.HasField("g") else attribute.graphs:
                yield from _nodes(inner)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g, *attribute.graphs] if attribute.HasField("g") else attribute.graphs:
                yield from _graphs(inner)


def _tensors(proto: onnx.ModelProto) -> Iterator[TensorProto]:
    for graph in _graphs(proto.graph):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for source in [proto.graph, *proto.functions]:
        for node in _nodes(source):
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors
                if attribute.HasField("sparse_tensor"):
                    yield from (attribute.sparse_tensor.values, attribute.sparse_tensor.indices)


def _size(tensor: TensorProto) -> int:
    """Bytes of the values that a tensor claims to have; of strings, their number."""
    dims = list(tensor.dims)
    if any(d < 0 for d in dims):
        raise DamagedFileError(f"tensor {tensor.name!r} has shape {dims}")
    count = math.prod(dims)
    if tensor.data_type == TensorProto.STRING:
        return count
    if tensor.data_type in _PACKED:
        return -(-count // 2)
    try:
        return count * np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize
    except KeyError:
        raise DamagedFileError(f"tensor {tensor.name!r} is of type {tensor.data_type}, which ONNX has not") from None


def _check_tensor(tensor: TensorProto) -> None:
    size, dims = _size(tensor), list(tensor.dims)
    if tensor.HasField("raw_data"):
        if len(tensor.raw_data) != size:
            raise DamagedFileError(f"tensor {tensor.name!r} of shape {dims} has {len(tensor.raw_data)} bytes")
        return
    field, entries = _FIELDS.get(tensor.data_type, ("int32_data", 1))
    found = len(getattr(tensor, field))
    wanted = size if tensor.data_type in _PACKED else math.prod(dims) * entries
    if found != wanted:
        raise DamagedFileError(f"tensor {tensor.name!r} of shape {dims} has {found} entries; expected {wanted}")


def _load_external(proto: onnx.ModelProto, folder: Path, size: int) -> None:
    """Put the values of tensors that lie in files of ``folder`` into them."""
    outside = [t for t in _tensors(proto) if t.data_location == TensorProto.EXTERNAL]
    files: dict[str, IO[bytes]] = {}
    try:
        for tensor in outside:
            entries = {e.key: e.value for e in tensor.external_data}
            location = entries.get("location", "")
            if location not in files:
                files[location] = _opened(folder, location, tensor.name)
                size += os.fstat(files[location].fileno()).st_size
        # all sizes before the first value; tensors may share their bytes
        check_growth(size, sum(_size(t) for t in outside), "what it holds")
        for tensor in outside:
            _fill(tensor, files)
    finally:
        for stream in files.values():
            stream.close()


def _opened(folder: Path, location: str, tensor: str) -> IO[bytes]:
    """External data: a file in the folder of the model, wherever links lead."""
    plain = PurePath(location)
    path = folder / plain
    inside = location and not plain.is_absolute() and ".." not in plain.parts
    if not inside or not path.resolve().is_relative_to(folder.resolve()):
        raise DamagedFileError(
            f"the values of tensor {tensor!r} are said to lie in {location!r}, outside of the folder of the model"
        )
    if not path.is_file():
        raise DamagedFileError(f"the values of tensor {tensor!r} are missing: there is no {location!r} beside it")
    return open(path, "rb")


def _fill(tensor: TensorProto, files: Mapping[str, IO[bytes]]) -> None:
    entries = {e.key: e.value for e in tensor.external_data}
    location, size = entries["location"], _size(tensor)
    start = int(entries.get("offset") or 0)
    length = int(entries.get("length") or size)
    if start < 0 or length != size:
        raise DamagedFileError(f"tensor {tensor.name!r} needs {size} bytes, and has {length} from byte {start}")
    files[location].seek(start)
    data = files[location].read(min(size, os.fstat(files[location].fileno()).st_size))
    if len(data) != size:
        raise DamagedFileError(f"{location!r} ends within tensor {tensor.name!r}")
    tensor.raw_data = data
    tensor.data_location = TensorProto.DEFAULT
    del tensor.external_data[:]
