"""An ONNX file, its bytes or a ModelProto, as one graph without functions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

import onnx
import onnx.inliner

from lightning_ort.errors import CheckpointError, UnsupportedError
from lightning_ort.files.onnx_files import check_count, check_model, read_onnx
from lightning_ort.files.reading import refusing
from lightning_ort.onnx_reader.initializers import FLOATS
from lightning_ort.onnx_reader.reader import CONTROL_FLOW
from lightning_ort.onnx_reader.registry import OPERATORS
from lightning_ort.onnx_reader.values import label_of
from lightning_ort.validation import path

__all__ = [
    "Model",
    "load",
    "name_of",
    "parsed",
    "using",
]

_MIN_OPSET, _MAX_OPSET = 13, 21
STRUCTURE = frozenset({"Constant", "Identity", *CONTROL_FLOW})
"""operators that the reader resolves itself, without a row in the table"""

Model = onnx.ModelProto | bytes | str | os.PathLike[str]
"""What can be read: a path (external data is looked for beside it), a serialized model, or a ModelProto."""


def load(model: Model) -> onnx.ModelProto:
    """Read ``model`` and write its functions out; a ModelProto that was passed in is not changed.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: the file or the bytes are no ONNX model, or a damaged one.
        UnsupportedError: another opset than 13 to 21, or operators that are not in the table, each with its node.
    """
    proto = parsed(model)
    with using(name_of(model)):
        return _written_out(proto)


def _written_out(proto: onnx.ModelProto) -> onnx.ModelProto:
    check_count(proto)
    if any(f.name for f in proto.functions):
        proto = _inlined(proto)
    opset = _opset(proto)
    if opset is None or not _MIN_OPSET <= opset <= _MAX_OPSET:
        raise UnsupportedError(
            f"The model is written for ONNX opset {opset}; opsets {_MIN_OPSET} to {_MAX_OPSET} can be read. Convert it "
            "with onnx.version_converter.convert_version(model, 17), or export it again with opset_version=17."
        )
    unknown = dict.fromkeys(_unknown(proto.graph))
    if unknown:
        raise UnsupportedError("These ONNX operators cannot be read as torch operations:\n  " + "\n  ".join(unknown))
    return _lifted(proto)


def _lifted(proto: onnx.ModelProto) -> onnx.ModelProto:
    """``proto`` with the float initializers of its branches and loop bodies among its own, where they can be trained.

    One whose name another value of the model has gets a number behind it.
    """
    if not any(i.data_type in FLOATS for graph in _subgraphs(proto.graph) for i in graph.initializer):
        return proto
    lifted = onnx.ModelProto()
    lifted.CopyFrom(proto)
    graphs = [lifted.graph, *_subgraphs(lifted.graph)]
    inside = [(graph, i.name) for graph in graphs[1:] for i in graph.initializer if i.data_type in FLOATS]
    moved = {name for _, name in inside}
    taken = set().union(*map(_names, graphs)) - moved | (_names(lifted.graph) & moved)
    for graph, name in inside:
        new, number = name, 0
        while new in taken or (new != name and new in moved):
            number += 1
            new = f"{name}_{number}"
        taken.add(new)
        if new != name:
            _rename(graph, name, new)
        position = next(i for i, initializer in enumerate(graph.initializer) if initializer.name == name)
        lifted.graph.initializer.add().CopyFrom(graph.initializer[position])
        lifted.graph.initializer[-1].name = new
        del graph.initializer[position]
    return lifted


def _subgraphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The branches and bodies in ``graph``, and those in them."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield attribute.g
                yield from _subgraphs(attribute.g)


def _names(graph: onnx.GraphProto) -> set[str]:
    """The names that ``graph`` gives to values, without those in its branches and bodies."""
    return {v.name for v in [*graph.initializer, *graph.input]} | {o for node in graph.node for o in node.output}


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Let everything in ``graph`` that reads ``old`` read ``new``."""
    for inner in (graph, *_subgraphs(graph)):
        for node in inner.node:
            node.input[:] = [new if name == old else name for name in node.input]
        for output in inner.output:
            output.name = new if output.name == old else output.name


def _opset(graph: onnx.ModelProto | onnx.FunctionProto) -> int | None:
    return next((i.version for i in graph.opset_import if i.domain in ("", "ai.onnx")), None)


def _inlined(proto: onnx.ModelProto) -> onnx.ModelProto:
    """``proto`` with the nodes of its functions in the place of their calls, in the opset of the model.

    Raises:
        UnsupportedError: a function is of another opset, to which there is no way from its own.
    """
    opset = _opset(proto)
    if opset is None or all(_opset(f) in (None, opset) for f in proto.functions):
        return onnx.inliner.inline_local_functions(proto)
    relabelled = onnx.ModelProto()
    relabelled.CopyFrom(proto)
    for function in relabelled.functions:
        if _means_the_same(function, opset):
            for i in function.opset_import:
                i.version = opset if i.domain in ("", "ai.onnx") else i.version
    others = {f.name: _opset(f) for f in relabelled.functions if _opset(f) not in (None, opset)}
    if not others:
        return onnx.inliner.inline_local_functions(relabelled)
    try:
        return onnx.inliner.inline_local_functions(proto, convert_version=True)
    except Exception as error:
        listed = ", ".join(f"{name} for opset {version}" for name, version in others.items())
        raise UnsupportedError(
            f"The model is written for opset {opset}, and functions in it for others ({listed}), which ONNX cannot "
            f"convert: {next(iter(str(error).splitlines()), '')}. Export them for one opset."
        ) from error


def _means_the_same(function: onnx.FunctionProto, opset: int) -> bool:
    """Whether its operators are the same ones in ``opset``."""
    own = _opset(function)
    if own is None:
        return True

    def same(nodes: Iterable[onnx.NodeProto]) -> bool:
        for node in nodes:
            if node.domain in ("", "ai.onnx"):
                try:
                    schemas = [onnx.defs.get_schema(node.op_type, v, "") for v in (own, opset)]
                except onnx.defs.SchemaError:
                    return False
                if schemas[0].since_version != schemas[1].since_version:
                    return False
            if not all(same(a.g.node) for a in node.attribute if a.type == onnx.AttributeProto.GRAPH):
                return False
        return True

    return same(function.node)


def parsed(model: Model) -> onnx.ModelProto:
    """``model`` as it is, whatever its operators; a ModelProto that was passed in is returned itself.

    Raises:
        FileNotFoundError, ValueError: no such file, or no ONNX model.
    """
    if isinstance(model, onnx.ModelProto):
        with using(name_of(model)):
            check_model(model)
        return model
    if not isinstance(model, (bytes, bytearray, str, os.PathLike)):
        raise TypeError(f"model is a {type(model).__name__}; expected onnx.ModelProto, bytes or a path")
    if not isinstance(model, (bytes, bytearray)):
        return read_onnx(path("model", model))
    with refusing(name_of(model), "no ONNX model, or a truncated one"):
        proto = onnx.load_model_from_string(bytes(model))
        check_model(proto)
    return proto


def name_of(model: Model) -> str:
    """What a model is called in messages."""
    if isinstance(model, (str, os.PathLike)):
        return repr(os.fspath(model))
    return "the ONNX model" if isinstance(model, onnx.ModelProto) else "the bytes passed as model"


def using(name: str) -> contextlib.AbstractContextManager[None]:
    """A block that uses what :func:`load` gave: its errors begin with ``name``, which :func:`name_of` gave."""
    return refusing(name, "not to be used", kind=CheckpointError, prefix=name.startswith("'"))


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
