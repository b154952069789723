"""Which initializers of an ONNX file are trained."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator

import numpy as np
import onnx
from onnx import numpy_helper

from lightning_ort.errors import UnsupportedError
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
    notes = _notes(model)
    if notes is None:
        fixed = _fixed_exponents(model) | {name for name in floats if _CONSTANT.fullmatch(name)}
        return [name for name in floats if name not in fixed or name in settled]
    verdicts = {name: _is_trained(initializer, notes) for name, initializer in floats.items()}
    unclear = [name for name, trained in verdicts.items() if trained is None]
    open_ = [name for name in unclear if name not in settled]
    if open_:
        raise UnsupportedError(_unclear(open_, notes))
    trained = [name for name in floats if verdicts[name] or name in unclear]
    _check_copies([name for name in trained if name not in settled], notes)
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


# -- what torch's exporter notes ------------------------------------------------------------------------------------

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
class _Notes:
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


def _notes(model: onnx.ModelProto) -> _Notes | None:
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
    return _Notes(kinds, folded, signature, _fused(nodes, signature, {*kinds, *folded}), callers, data)


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


def _is_trained(initializer: onnx.TensorProto, notes: _Notes) -> bool | None:
    """Whether ``initializer`` is a parameter, in its own place or another; ``None``: the file does not tell."""
    name = initializer.name
    if name in notes.folded:
        return _is_moved(initializer, notes)
    if name in notes.kinds:
        return notes.kinds[name] == _PARAMETER
    if notes.signature:
        return notes.fused.get(name, notes.signature.get(name) == _PARAMETER)
    return False if notes.folded and _NUMBERED.fullmatch(name) else None


def _is_moved(initializer: onnx.TensorProto, notes: _Notes) -> bool | None:
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


def _roots(name: str, notes: _Notes) -> list[str]:
    """The tensors of the module that an initializer was computed from; all names that may be some, if unknown."""
    sources = [s for s in notes.folded.get(name, []) if s not in notes.data]
    if notes.signature:
        return [s for s in sources if s in notes.signature]
    return [s for s in sources if not _NUMBERED.fullmatch(s) and not _MAKING.fullmatch(_function(s))]


def _functions(name: str, notes: _Notes) -> set[str]:
    """The functions of torch that an initializer was computed with: their results have their names.

    A tensor of the module may have such a name too; the exporter does not write a file that has both.
    """
    sources = [s for s in notes.folded[name] if s not in notes.data and s not in notes.signature]
    return {_function(s) for s in (*sources, name) if not _NUMBERED.fullmatch(s)}


def _function(name: str) -> str:
    """The function of torch, if the exporter has given ``name`` to a result."""
    return re.sub(r"_\d+$", "", name).removesuffix("_default")


def _unclear(names: list[str], notes: _Notes) -> str:
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


def _check_copies(names: list[str], notes: _Notes) -> None:
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
