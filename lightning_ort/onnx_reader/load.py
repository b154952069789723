"""An ONNX file, its bytes or a ModelProto, as one graph without functions."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx.inliner
from google.protobuf.message import DecodeError

from lightning_ort.errors import UnsupportedError
from lightning_ort.onnx_reader.control_flow import CONTROL_FLOW
from lightning_ort.onnx_reader.registry import OPERATORS
from lightning_ort.onnx_reader.values import label_of

__all__ = ["MAX_OPSET", "MIN_OPSET", "Model", "load"]

MIN_OPSET, MAX_OPSET = 13, 21
STRUCTURE = frozenset({"Constant", "Identity", *CONTROL_FLOW})
"""operators that the reader resolves itself, without a row in the table"""

Model = onnx.ModelProto | bytes | str | os.PathLike[str]
"""What can be read: a path (external data is looked for beside it), a serialized model, or a ModelProto."""


def load(model: Model) -> onnx.ModelProto:
    """Read ``model`` and write its functions out; a ModelProto that was passed in is not changed.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file or the bytes are no ONNX model.
        UnsupportedError: another opset than 13 to 21, or operators that are not in the table, each with its node.
    """
    proto = _parse(model)
    if any(f.name for f in proto.functions):
        proto = onnx.inliner.inline_local_functions(proto)
    opset = next((i.version for i in proto.opset_import if i.domain in ("", "ai.onnx")), None)
    if opset is None or not MIN_OPSET <= opset <= MAX_OPSET:
        raise UnsupportedError(
            f"The model is written for ONNX opset {opset}; opsets {MIN_OPSET} to {MAX_OPSET} can be read. Convert it "
            "with onnx.version_converter.convert_version(model, 17), or export it again with opset_version=17."
        )
    unknown = dict.fromkeys(_unknown(proto.graph))
    if unknown:
        raise UnsupportedError("These ONNX operators cannot be read as torch operations:\n  " + "\n  ".join(unknown))
    return proto


def _parse(model: Model) -> onnx.ModelProto:
    if isinstance(model, onnx.ModelProto):
        return model
    if not isinstance(model, (bytes, bytearray, str, os.PathLike)):
        raise TypeError(f"model is a {type(model).__name__}; expected onnx.ModelProto, bytes or a path")
    name = "the bytes passed as model" if isinstance(model, (bytes, bytearray)) else f"{os.fspath(model)!r}"
    try:
        if isinstance(model, (bytes, bytearray)):
            proto = onnx.load_model_from_string(bytes(model))
        else:
            if not Path(model).is_file():
                raise FileNotFoundError(f"There is no ONNX file {name}.")
            proto = onnx.load_model(os.fspath(model))
    except DecodeError as error:
        raise ValueError(f"{name} is no ONNX model, or a truncated one ({error}).") from error
    if not proto.graph.node and not proto.graph.output:
        raise ValueError(f"{name} holds no ONNX graph.")
    return proto


def _unknown(graph: onnx.GraphProto) -> list[str]:
    found = []
    for node in graph.node:
        domain = "" if node.domain == "ai.onnx" else node.domain
        if (domain, node.op_type) not in OPERATORS and not (domain == "" and node.op_type in STRUCTURE):
            full = f"{domain}.{node.op_type}" if domain else node.op_type
            found.append(label_of(node).replace(node.op_type, full, 1))
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                found += _unknown(attribute.g)
    return found
