"""An ONNX file, its bytes or a ModelProto, as one graph without functions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

import onnx
import onnx.inliner

from lightning_ort.errors import CheckpointError, UnsupportedError
from lightning_ort.files.onnx_files import check_count, check_model, read_onnx
from lightning_ort.files.reading import refusing
from lightning_ort.onnx_reader.initializers import FLOATS
from lightning_ort.onnx_reader.reader import CONTROL_FLOW, names_read, names_read_by
from lightning_ort.onnx_reader.registry import OPERATORS
from lightning_ort.onnx_reader.values import bodies, label_of, subgraphs
from lightning_ort.runtime.tensors import TORCH
from lightning_ort.validation import listed, path

__all__ = [
    "Model",
    "load",
    "name_of",
    "parsed",
    "using",
]

_MIN_OPSET, _MAX_OPSET = 13, 26
STRUCTURE = frozenset({"Constant", "Identity", *CONTROL_FLOW})
"""operators that the reader resolves itself, without a row in the table"""

Model = onnx.ModelProto | bytes | str | os.PathLike[str]
"""What can be read: a path (external data is looked for beside it), a serialized model, or a ModelProto."""


def load(model: Model, wanted: Collection[str] | None = None) -> onnx.ModelProto:
    """Read ``model`` and write its functions out; a ModelProto that was passed in is not changed.

    Operators that no output needs may be unknown; where there are some, all nodes that no output needs are left out.

    Args:
        model: a path, bytes or a ModelProto.
        wanted: names of the outputs that the caller asks for; others are left out where they need operators that are
            not known. By default all are asked for.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: the file or the bytes are no ONNX model, or a damaged one.
        UnsupportedError: another opset than 13 to 21, or operators that are not in the table, each with its node.
    """
    proto = parsed(model)
    with using(name_of(model)):
        return _written_out(proto, wanted)


def _written_out(proto: onnx.ModelProto, wanted: Collection[str] | None) -> onnx.ModelProto:
    check_count(proto)
    if any(f.name for f in proto.functions):
        proto = _inlined(_with_defaults(proto))
    opset = _opset(proto)
    if opset is None or not _MIN_OPSET <= opset <= _MAX_OPSET:
        raise UnsupportedError(
            f"The model is written for ONNX opset {opset}; opsets {_MIN_OPSET} to {_MAX_OPSET} can be read. Export it "
            "again with opset_version=18, or convert it with onnx.version_converter.convert_version(model, 18), which "
            "has no way back for operators that a later opset has introduced."
        )
    if any(_unknown(proto.graph.node)):
        proto = _needed(proto, wanted)
        _check_operators(proto.graph)
    return _lifted(proto)


def _check_operators(graph: onnx.GraphProto) -> None:
    """Refuse a graph whose outputs need operators that are not in the table.

    Raises:
        UnsupportedError: with their nodes, and with the outputs without which there would be none.
    """
    unknown = dict.fromkeys(_unknown(graph.node))
    if not unknown:
        return
    beyond = _beyond(graph)
    needing = [o.name for o in graph.output if o.name in beyond]
    others = [o.name for o in graph.output if o.name not in beyond]
    advice = (
        f"\nOnly these outputs need them: {listed(map(repr, needing))}. Take these out of graph.output of the model to "
        f"train it by the others: {listed(map(repr, others))}."
    )
    raise UnsupportedError(
        "These ONNX operators cannot be read as torch operations:\n  "
        + "\n  ".join(unknown)
        + (advice if others else "")
    )


def _needed(proto: onnx.ModelProto, wanted: Collection[str] | None) -> onnx.ModelProto:
    """``proto`` without the nodes that no output needs, nor the outputs that cannot be read and are not ``wanted``.

    A classifier gives labels beside the probabilities that it is trained by, and looks them up by operators that no
    gradient passes.
    """
    needed = onnx.ModelProto()
    needed.CopyFrom(proto)
    _prune(needed.graph)
    beyond: set[str] = set() if wanted is None else _beyond(needed.graph) - set(wanted)
    if any(o.name not in beyond for o in needed.graph.output):
        _drop(needed.graph.output, lambda output: output.name in beyond)
        _prune(needed.graph)
    read = set(names_read(needed.graph))
    # texts, such as those labels: no operator in the table takes them
    _drop(needed.graph.initializer, lambda i: i.data_type not in TORCH and i.name not in read)
    return needed


def _prune(graph: onnx.GraphProto) -> None:
    """Take out the nodes that no output of ``graph`` needs, and the same in its branches and bodies."""
    read = {output.name for output in graph.output}

    def is_idle(node: onnx.NodeProto) -> bool:
        if read.isdisjoint(node.output):
            return True
        for body in bodies(node):
            _prune(body)
        read.update(names_read_by(node))
        return False

    _drop(graph.node, is_idle)


def _drop(field: Any, unwanted: Callable[[Any], bool]) -> None:
    """Take entries out of a repeated field, which are asked for from the last to the first."""
    for position in reversed(range(len(field))):
        if unwanted(field[position]):
            del field[position]


def _beyond(graph: onnx.GraphProto) -> set[str]:
    """The values of ``graph`` that need an operator that is not in the table."""
    found: set[str] = set()
    for node in graph.node:
        if any(_unknown([node])) or not found.isdisjoint(names_read_by(node)):
            found.update(filter(None, node.output))
    return found


def _lifted(proto: onnx.ModelProto) -> onnx.ModelProto:
    """``proto`` with the float initializers of its branches and loop bodies among its own, where they can be trained.

    One whose name another value of the model has gets a number behind it.
    """
    if not any(i.data_type in FLOATS for graph in subgraphs(proto.graph) for i in graph.initializer):
        return proto
    lifted = onnx.ModelProto()
    lifted.CopyFrom(proto)
    graphs = [lifted.graph, *subgraphs(lifted.graph)]
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


def _names(graph: onnx.GraphProto) -> set[str]:
    """The names that ``graph`` gives to values, without those in its branches and bodies."""
    return {v.name for v in [*graph.initializer, *graph.input]} | {o for node in graph.node for o in node.output}


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Let everything in ``graph`` that reads ``old`` read ``new``."""
    for inner in (graph, *subgraphs(graph)):
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


def _with_defaults(proto: onnx.ModelProto) -> onnx.ModelProto:
    """``proto`` with calls of functions that give all attributes for which the function has a default.

    ``onnx.inliner`` knows no defaults: the operators within would take their own, where ONNX Runtime takes those of the
    function. What a call leaves out may be passed on to a function that has a default for it, so that there is a copy
    of the function for each set of attributes that calls leave out.
    """
    if not any(f.attribute_proto for f in proto.functions):
        return proto
    found = onnx.ModelProto()
    found.CopyFrom(proto)
    del found.functions[:]
    functions = {_id(f.domain, f.name, f.overload): f for f in proto.functions}
    made: dict[tuple[str, ...], str] = {}

    def settle(nodes: Iterable[onnx.NodeProto]) -> None:
        for node in nodes:
            for body in bodies(node):
                settle(body.node)
            function = functions.get(_id(node.domain, node.op_type, node.overload))
            if function is not None:
                given = {a.name for a in node.attribute}
                node.attribute.extend(_default(function, a) for a in function.attribute_proto if a.name not in given)
                node.op_type = name_of_copy(function, [a for a in function.attribute if a not in given])

    def name_of_copy(function: onnx.FunctionProto, absent: list[str]) -> str:
        """That of the copy for calls that leave ``absent`` to the operators and functions within."""
        key = (*_id(function.domain, function.name, function.overload), *absent)
        if key not in made:
            made[key] = f"{function.name} without {', '.join(absent)}" if absent else function.name
            copy = found.functions.add()
            copy.CopyFrom(function)
            copy.name = made[key]
            _leave_out(copy.node, absent)
            settle(copy.node)
        return made[key]

    settle(found.graph.node)
    return found


def _id(domain: str, name: str, overload: str) -> tuple[str, str, str]:
    """What tells a function from all others."""
    return "" if domain == "ai.onnx" else domain, name, overload


def _default(function: onnx.FunctionProto, attribute: onnx.AttributeProto) -> onnx.AttributeProto:
    """``attribute``, which a call is to give.

    Raises:
        UnsupportedError: it is a graph, in which there may be calls again.
    """
    if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
        raise UnsupportedError(
            f"The function {function.name!r} has a graph as the default of its attribute {attribute.name!r}, which "
            "cannot be read. Give that graph where the function is called."
        )
    return attribute


def _leave_out(nodes: Iterable[onnx.NodeProto], absent: Collection[str]) -> None:
    """Take the attributes out that are those of a function which a call leaves out."""
    for node in nodes:
        _drop(node.attribute, lambda attribute: attribute.ref_attr_name in absent)
        for body in bodies(node):
            _leave_out(body.node, absent)


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

    Where nodes come before those that they read from, which ONNX forbids and ONNX Runtime takes, it is a sorted copy.

    Raises:
        FileNotFoundError, ValueError: no such file, or no ONNX model.
    """
    if isinstance(model, onnx.ModelProto):
        with using(name_of(model)):
            check_model(model)
            return _sorted(model)
    if not isinstance(model, (bytes, bytearray, str, os.PathLike)):
        raise TypeError(f"model is a {type(model).__name__}; expected onnx.ModelProto, bytes or a path")
    if not isinstance(model, (bytes, bytearray)):
        found = read_onnx(path("model", model))
        with using(name_of(model)):
            return _sorted(found)
    with refusing(name_of(model), "no ONNX model, or a truncated one"):
        proto = onnx.load_model_from_string(bytes(model))
        check_model(proto)
        return _sorted(proto)


def _sorted(proto: onnx.ModelProto) -> onnx.ModelProto:
    if all(_is_sorted(graph) for graph in (proto.graph, *subgraphs(proto.graph))):
        return proto
    found = onnx.ModelProto()
    found.CopyFrom(proto)
    for graph in reversed([found.graph, *subgraphs(found.graph)]):  # innermost first: nodes are copied
        _sort(graph)
    return found


def _is_sorted(graph: onnx.GraphProto) -> bool:
    to_come = {name for node in graph.node for name in node.output}
    for node in graph.node:
        if not to_come.isdisjoint(names_read_by(node)):
            return False
        to_come.difference_update(node.output)
    return True


def _sort(graph: onnx.GraphProto) -> None:
    """
    Raises:
        ValueError: nodes read each other's results.
    """
    producers = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    reads = {
        i: {producers[name] for name in names_read_by(node) if name in producers} for i, node in enumerate(graph.node)
    }
    try:
        order = [*TopologicalSorter(reads).static_order()]
    except CycleError as error:
        names = ", ".join(label_of(graph.node[i]) for i in dict.fromkeys(error.args[1]))
        raise ValueError(f"its nodes read each other's results: {names}") from None
    nodes = [onnx.NodeProto.FromString(graph.node[i].SerializeToString()) for i in order]
    del graph.node[:]
    graph.node.extend(nodes)


def name_of(model: Model) -> str:
    """What a model is called in messages."""
    if isinstance(model, (str, os.PathLike)):
        return repr(os.fspath(model))
    return "the ONNX model" if isinstance(model, onnx.ModelProto) else "the bytes passed as model"


def using(name: str) -> contextlib.AbstractContextManager[None]:
    """A block that uses what :func:`load` gave: its errors begin with ``name``, which :func:`name_of` gave."""
    return refusing(name, "not to be used", kind=CheckpointError, prefix=name.startswith("'"))


def _unknown(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """What is not in the table, of ``nodes`` and of those in their branches and bodies."""
    for node in nodes:
        domain = "" if node.domain == "ai.onnx" else node.domain
        if (domain, node.op_type) not in OPERATORS and not (domain == "" and node.op_type in STRUCTURE):
            full = f"{domain}.{node.op_type}" if domain else node.op_type
            yield label_of(node).replace(node.op_type, full, 1)
        for body in bodies(node):
            yield from _unknown(body.node)
