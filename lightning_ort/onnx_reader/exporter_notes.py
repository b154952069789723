"""What torch's ONNX exporter (``dynamo=True``) notes on initializers in its files, and which are parameters by that."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import numpy_helper

from lightning_ort.errors import UnsupportedError
from lightning_ort.onnx_reader.values import subgraphs

__all__ = ["ExporterNotes", "check_copies", "is_trained", "read_notes", "say_unclear"]

_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
"""With this key the graph has a list of all tensors of the module, those that were computed with among them."""

_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""With this key it says which initializer was a parameter, a buffer or a constant."""

_FOLDED = "pkg.onnxscript.optimizer.folded_from"
"""With this key its optimizer lists, in no order, the names of what an initializer was computed from."""

_CALL = "pkg.torch.onnx.fx_node"
"""With this key a node has the call of torch's function that it was made for."""

_RULE = "pkg.onnxscript.rewriter.rule_name"
"""With this key a node has the rules of the rewriter that made it."""

_PREFIXES = ("pkg.torch.", "pkg.onnxscript.")

_FUSED = {"Conv", "ConvTranspose", "Gemm"}
"""Its rewriter makes new weights for these from the old ones and a batch norm."""

_MOVING = frozenset([
    "_unsafe_view", "alias", "cat", "chunk", "clone", "contiguous", "detach", "flatten", "getitem", "movedim",
    "permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "t", "transpose",
    "unbind", "unflatten", "unsqueeze", "view",
])  # fmt: skip
"""Functions of torch that give each entry of an operand at most once, as it is."""

_JOINING = {"cat", "stack"}
"""Of these, those that give entries of several operands, which may be the same one."""

_TURNING = {"flatten", "movedim", "permute", "reshape", "t", "transpose", "unflatten", "view"}
"""Of these, those after which the rows of a table may no longer be rows."""

_LAYERS = {
    "bilinear", "group_norm", "gru", "linear", "lstm", "native_group_norm", "prelu", "rnn_relu", "rnn_tanh",
}  # fmt: skip
"""Functions of torch for which the exporter moves weights, each entry to one place, and does nothing else to them."""

_MAKING = re.compile(r"arange|full|zeros|ones|eye|linspace|logspace|scalar_tensor|tri[lu]_indices|new_\w+|\w+_like")
_NUMBERED = re.compile(r"val(_\d+)+|tmp(_\d+)?|(int|float|bool|double)\d*_\w+")  # the latter within its own functions
_PARAMETER, _INPUT = "PARAMETER", "USER_INPUT"


@dataclasses.dataclass
class ExporterNotes:
    """What a file of torch's exporter says about its initializers."""

    kinds: dict[str, str]
    """initializers that are as they were in the module, to what they were"""
    folded: dict[str, list[str]]
    """initializers that were computed, to the names of all values on the way there"""
    signature: dict[str, str]
    """names of the module's tensors to what they were; empty where the file has lost it"""
    fused: dict[str, bool | None]
    """weights and biases that took in a batch norm, to whether they are parameters; ``None``: not to be told"""
    callers: dict[str, set[str]]
    """values to the functions of torch that read them"""
    data: set[str]
    """values that depend on inputs of the graph; only their sizes can be in an initializer"""


def read_notes(model: onnx.ModelProto) -> ExporterNotes | None:
    """The notes in ``model``, or nothing where it does not come from torch's exporter (``dynamo=True``)."""
    nodes = list(_nodes(model.graph))
    entries = [(v.name, p.key, p.value) for v in model.graph.value_info for p in v.metadata_props]
    signature = _tensors(next((p.value for p in model.graph.metadata_props if p.key == _SIGNATURE), ""))
    noted = {key for _, key, _ in entries} | {p.key for p in model.graph.metadata_props}
    noted |= {p.key for node in nodes for p in node.metadata_props}
    # the names of nodes are left where another tool has removed all else
    named = model.producer_name == "pytorch" and any(node.name.startswith("node_") for node in nodes)
    if not named and not any(key.startswith(_PREFIXES) for key in noted):
        return None
    kinds = {name: value for name, key, value in entries if key == _KIND}
    folded = {name: re.findall(r"'([^']+)'", value) for name, key, value in entries if key == _FOLDED}
    callers: dict[str, set[str]] = {}
    for node in nodes:
        call = re.search(r"target=torch\.ops\.\w+\.(\w+)", _metadata(node, _CALL))
        for name in node.input:
            callers.setdefault(name, set()).add(call[1] if call else "")
    data = {name for node in nodes for name in node.output} | {i.name for i in model.graph.input}
    data |= {name for name, kind in signature.items() if kind == _INPUT}
    data -= {name for name, kind in signature.items() if kind != _INPUT}
    return ExporterNotes(kinds, folded, signature, _fused(nodes, signature, {*kinds, *folded}), callers, data)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of ``graph``, and those in its branches and bodies."""
    for part in (graph, *subgraphs(graph)):
        yield from part.node


def _metadata(node: onnx.NodeProto, key: str) -> str:
    return next((p.value for p in node.metadata_props if p.key == key), "")


_NOW = re.compile(r"^(?P<name>\S+): (?P<kind>[A-Z_]+)(?: target='(?P<target>.*?)')?(?: persistent=\w+)?$", re.MULTILINE)
_BEFORE = re.compile(  # the text that older versions of torch write
    r"InputSpec\(kind=<InputKind\.(?P<kind>\w+): \d+>, arg=\w+\(name='(?P<name>[^']*)'.*?\), "
    r"target=(?:None|'(?P<target>.*?)'),"
)


def _tensors(signature: str) -> dict[str, str]:
    """Names of the module's tensors and inputs, from the text of its signature, to what they were."""
    inputs = signature.partition("# outputs")[0].partition("output_specs=")[0]
    found = [entry for pattern in (_NOW, _BEFORE) for entry in pattern.finditer(inputs)]
    arguments = {entry["name"]: entry["kind"] for entry in found if not entry["target"]}
    return arguments | {entry["target"]: entry["kind"] for entry in found if entry["target"]}


def _fused(nodes: list[onnx.NodeProto], signature: dict[str, str], marked: set[str]) -> dict[str, bool | None]:
    """The weights and biases that took in a batch norm: they have the names of the old ones, but no mark."""
    fused: dict[str, bool | None] = {}
    for node in nodes:
        weight, *bias = [*node.input[1:3], ""][:2] if node.op_type in _FUSED else [""]
        if not weight or weight in marked:
            continue
        known = signature.get(weight) == _PARAMETER
        if known or "BatchNorm" in _metadata(node, _RULE):
            for name in (weight, *bias):
                is_parameter = known and signature.get(name, _PARAMETER) == _PARAMETER
                fused |= {name: True if is_parameter else None} if name and name not in marked else {}
    return fused


def is_trained(initializer: onnx.TensorProto, notes: ExporterNotes) -> bool | None:
    """Whether ``initializer`` is a parameter, in its own place or another; ``None``: the file does not tell."""
    name = initializer.name
    if name in notes.folded:
        return _is_moved(initializer, notes)
    if name in notes.kinds:
        return notes.kinds[name] == _PARAMETER
    if notes.signature:
        return notes.fused.get(name, notes.signature.get(name) == _PARAMETER)
    return False if notes.folded and _NUMBERED.fullmatch(name) else None


def _is_moved(initializer: onnx.TensorProto, notes: ExporterNotes) -> bool | None:
    """Whether a computed ``initializer`` has each entry of its parameters at most once, as it is, and nothing else.

    It is no parameter where none is among what it was computed from, whatever was done. ``None``: something else, or
    the file does not tell.
    """
    roots, functions = _roots(initializer.name, notes), _functions(initializer.name, notes)
    made = {f for f in functions if _MAKING.fullmatch(f)}
    if not notes.signature:
        return False if not roots and functions <= made else None
    parameters = [r for r in roots if notes.signature[r] == _PARAMETER]
    if not parameters:
        return False
    if _NUMBERED.fullmatch(initializer.name) and not notes.callers.get(initializer.name, {""}) <= _LAYERS:
        return None  # some step of a function, such as a scale
    functions -= made
    others = len(roots) - len(parameters)
    if functions & _JOINING:
        moved = not (made or others or functions - _MOVING) and _has_each_once(initializer, parameters)
    elif "embedding" in functions:
        moved = functions - _MOVING == {"embedding"} and not functions & _TURNING and len(parameters) == 1
        moved = moved and _is_distinct(numpy_helper.to_array(initializer).reshape(-1, initializer.dims[-1]))
    else:
        moved = not others and functions <= _MOVING
    return True if moved else None


def _has_each_once(initializer: onnx.TensorProto, parameters: list[str]) -> bool:
    """Whether ``parameters``, which were joined, cannot be in ``initializer`` twice: nothing in it is."""
    values = numpy_helper.to_array(initializer)
    if len(parameters) < 2:
        return False
    return values.size == len(parameters) or all(_is_distinct(np.moveaxis(values, i, 0)) for i in range(values.ndim))


def _is_distinct(values: np.ndarray) -> bool:
    """Whether no two entries along the first axis are the same."""
    return len(np.unique(values, axis=0)) == len(values)


def _roots(name: str, notes: ExporterNotes) -> list[str]:
    """The tensors of the module that an initializer was computed from; all names that may be some, if unknown."""
    sources = [s for s in notes.folded.get(name, []) if s not in notes.data]
    if notes.signature:
        return [s for s in sources if s in notes.signature]
    return [s for s in sources if not _NUMBERED.fullmatch(s) and not _MAKING.fullmatch(_function(s))]


def _functions(name: str, notes: ExporterNotes) -> set[str]:
    """The functions of torch that an initializer was computed with: their results have their names.

    A tensor of the module may have such a name too; the exporter does not write a file that has both.
    """
    sources = [s for s in notes.folded[name] if s not in notes.data and s not in notes.signature]
    return {_function(s) for s in (*sources, name) if not _NUMBERED.fullmatch(s)}


def _function(name: str) -> str:
    """The function of torch, if the exporter has given ``name`` to a result."""
    return re.sub(r"_\d+$", "", name).removesuffix("_default")


def say_unclear(names: list[str], notes: ExporterNotes) -> str:
    """What to say of initializers of which the file does not tell whether they are trained."""
    name = names[0]
    expected = "with dynamo=True and optimize=False"
    if name in notes.folded:
        origin = f"was computed by torch's exporter from {', '.join(_roots(name, notes))}"
    elif name in notes.fused:
        origin = (
            "was computed by torch's exporter from tensors of a layer that are not all parameters, and its batch norm"
        )
    else:
        origin = "is from torch's exporter, whose notes on the tensors of the module are no longer in the file"
        expected += " for opset 18 or later, and which no other tool has changed"
    rest = f" The same holds for {', '.join(map(repr, names[1:]))}." if names[1:] else ""
    return (
        f"Initializer {name!r} {origin}, and the file does not say whether that was trained, or how.{rest} Expected a "
        f"file with all parameters as they are in the module, which torch.onnx.export writes {expected}. Or say what "
        f"is trained: list the names of all initializers that are, or {', '.join(map(repr, names))} as not trained."
    )


def check_copies(names: list[str], notes: ExporterNotes) -> None:
    """
    Raises:
        UnsupportedError: several of ``names`` have entries of the same parameter.
    """
    places: dict[str, list[str]] = {}
    for name in names:
        for root in _roots(name, notes) or [name]:
            places.setdefault(root, []).append(name)
    for root, copies in places.items():
        if len(copies) > 1 and notes.signature.get(root) == _PARAMETER:
            listed = ", ".join(map(repr, copies))
            raise UnsupportedError(
                f"Initializers {listed} were all computed by torch's exporter from the parameter {root!r}, or are it. "
                "Each would be trained by itself, and they would come apart. Expected a file with all parameters as "
                "they are in the module, which torch.onnx.export writes with dynamo=True and optimize=False. Or say "
                "what is trained: list the names of all initializers that are, or all of these but one as not trained."
            )
