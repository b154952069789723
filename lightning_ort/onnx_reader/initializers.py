"""Which initializers of an ONNX file are trained."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from lightning_ort.errors import UnsupportedError
from lightning_ort.onnx_reader.registry import OPERATORS
from lightning_ort.runtime.tensors import TORCH

__all__ = ["FLOATS", "state_initializers", "trainable_initializers", "weight_initializers"]

FLOATS = {onnx_type for onnx_type, dtype in TORCH.items() if dtype.is_floating_point}
"""Element types of initializers that can be trained."""


def trainable_initializers(model: onnx.ModelProto, settled: Collection[str] = ()) -> list[str]:
    """Names of float initializers that reach an operator where a gradient can reach them.

    Sizes, bounds, scales of resizing, class weights and running statistics are not among them. Where torch's exporter
    has marked what it wrote, only its parameters count, weights that it has moved to another place (transposed for
    ``Linear``, reshaped for ``GroupNorm``, joined for ``LSTM``), and what its rewriter has computed from the weights
    of a layer and the batch norm that follows, which has no mark at all.

    Args:
        model: the file.
        settled: names that the user has spoken of; of those that the file does not tell of, these are in the result.

    Raises:
        UnsupportedError: the exporter has computed an initializer from tensors of the module, and the file does not
            say whether they are trained, or training it would be something else than training them.
    """
    used = weight_initializers(model)
    floats = {i.name: i for i in model.graph.initializer if i.data_type in FLOATS and i.name in used}
    notes = [(v.name, p.key, p.value) for v in model.graph.value_info for p in v.metadata_props]
    kinds = {name: value for name, key, value in notes if key == _KIND}
    folded = {name: re.findall(r"'([^']+)'", value) for name, key, value in notes if key == _FOLDED and name in floats}
    if not kinds and not folded:
        return list(floats)
    trained = {name for name, kind in kinds.items() if kind == "PARAMETER"}
    for name, sources in folded.items():
        moved = _is_trained(floats[name], sources)
        if moved or (moved is None and name in settled):
            trained.add(name)
        elif moved is None:
            raise UnsupportedError(
                f"Initializer {name!r} was computed by torch's exporter from {', '.join(_roots(sources))}, "
                "and the file does not say whether that was trained, or how. Expected a file with all parameters as "
                "they are in the module, which torch.onnx.export writes with dynamo=True and optimize=False. Or say "
                f"what is trained: list the names of all initializers that are, or {name!r} as one that is not."
            )
    noted = {name for name, key, _ in notes if key in (_KIND, _FOLDED)}
    layers = [node for node in model.graph.node if node.op_type in _FUSED]
    trained |= {name for node in layers for name in node.input[1:3]} - noted
    return [name for name in floats if name in trained]


def state_initializers(model: onnx.ModelProto) -> list[str]:
    """Names of initializers that a training run changes: running statistics."""
    state = {name for name, kind in _uses(model.graph, {}) if kind == "state"}
    return [i.name for i in model.graph.initializer if i.name in state]


def weight_initializers(model: onnx.ModelProto) -> set[str]:
    """Names of initializers, and of other values, that are results or that an operator reads, as neither constants nor
    running statistics."""
    return {name for name, kind in _uses(model.graph, {}) if kind == "tensor"}


def _uses(graph: onnx.GraphProto, same: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Each value that a node reads, and what it is there: ``state``, ``constant`` or ``tensor``.

    Args:
        same: the result of an ``Identity`` outside, to what it is.
    """
    same = dict(same)
    for node in graph.node:
        if node.op_type == "Identity" and node.domain in ("", "ai.onnx"):
            same[node.output[0]] = same.get(node.input[0], node.input[0])
            continue
        row = OPERATORS.get(("" if node.domain == "ai.onnx" else node.domain, node.op_type))
        for position, name in enumerate(node.input):
            if name and row is not None and (row.variadic or position < len(row.inputs)):
                role = row.input_name(position)
                kind = "state" if role in row.state else "constant" if role in row.constants else "tensor"
                yield same.get(name, name), kind
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _uses(attribute.g, same)
    for output in graph.output:
        yield same.get(output.name, output.name), "tensor"


# -- what torch's exporter notes ------------------------------------------------------------------------------------

_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""With this key it says which initializer was a parameter, a buffer or a constant."""

_FOLDED = "pkg.onnxscript.optimizer.folded_from"
"""With this key its optimizer lists, in no order, the names of what an initializer was computed from."""

_FUSED = {"Conv", "ConvTranspose", "Gemm"}
"""Its rewriter makes new weights for these from the old ones and a batch norm."""

_MOVING = frozenset([
    "alias", "cat", "chunk", "clone", "contiguous", "detach", "flatten", "getitem", "movedim", "permute", "reshape",
    "slice", "split", "split_with_sizes", "squeeze", "stack", "t", "transpose", "unbind", "unflatten", "unsqueeze",
    "view",
])  # fmt: skip
"""Functions of torch that give each entry of their operands at most once, as it is."""

_MAKING = re.compile(r"arange|full|zeros|ones|eye|linspace|logspace|scalar_tensor|tri[lu]_indices|new_\w+|\w+_like")
_NUMBERED = re.compile(r"val_\d+|tmp(_\d+)?|(int|float|bool|double)\d*_\w+")  # the latter within its own functions
_WEIGHT = re.compile(r"weight|bias")


def _is_trained(initializer: onnx.TensorProto, sources: list[str]) -> bool | None:
    """Whether what was computed from ``sources`` is a weight in another place; ``None``: the file does not tell."""
    roots = _roots(sources)
    functions = {f for s in [*sources, initializer.name] if (f := _function(s))}
    if not roots:
        return False
    functions = {f for f in functions if f != "lifted_tensor" and not _MAKING.fullmatch(f)}
    weights = [r for r in roots if _WEIGHT.search(r.rpartition(".")[2])]
    if functions <= _MOVING and (weights == roots or (sources == roots[:1] and len(initializer.dims) == 2)):
        return True
    if functions - _MOVING == {"embedding"} and len(weights) == 1:
        rows = numpy_helper.to_array(initializer).reshape(-1, initializer.dims[-1])
        if len(np.unique(rows, axis=0)) == len(rows):  # each of them was looked up once
            return True
    return None


def _roots(sources: list[str]) -> list[str]:
    """Those that the module has: neither numbered by the exporter nor named after functions."""
    return [s for s in sources if not _NUMBERED.fullmatch(s) and not _function(s)]


def _function(name: str) -> str:
    """The function of torch whose result the exporter has given this name, or nothing."""
    base = re.sub(r"_\d+$", "", name)
    if base in ("getitem", "lifted_tensor"):
        return base
    packet = None if "." in base else getattr(torch.ops.aten, base, None)
    # others are functions of numbers: aten::gamma
    return base if packet and any("Tensor" in str(getattr(packet, o)._schema) for o in packet.overloads()) else ""
