"""Which initializers of a graph are trained."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import onnx

from lightning_ort.onnx_reader.registry import OPERATORS

__all__ = ["state_initializers", "trainable_initializers"]

_FLOATS = {
    onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16,
}  # fmt: skip
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""With this key torch's exporter says which initializer was a parameter, a buffer or a constant."""

_FOLDED = "pkg.onnxscript.optimizer.folded_from"
"""With this key its optimizer lists the names of what an initializer was computed from."""


def _uses(graph: onnx.GraphProto) -> Iterator[tuple[str, str, str]]:
    """(value, operator, how the operator calls that input) of all nodes."""
    for node in graph.node:
        row = OPERATORS.get(("" if node.domain == "ai.onnx" else node.domain, node.op_type))
        for position, name in enumerate(node.input):
            if name and row is not None and (row.variadic or position < len(row.inputs)):
                role = row.input_name(position)
                kind = "state" if role in row.state else "constant" if role in row.constants else "tensor"
                yield name, node.op_type, kind
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _uses(attribute.g)
    for output in graph.output:
        yield output.name, "", "tensor"


def trainable_initializers(model: onnx.ModelProto) -> list[str]:
    """Names of float initializers that reach an operator where a gradient can reach them.

    Sizes, bounds, scales of resizing, class weights and running statistics are not among them. Where torch's exporter
    has marked the parameters, only these count, and what it folded from the tensor of a submodule or, as a matrix, from
    one tensor (the transposed weights of ``Linear``, the reshaped ones of ``GroupNorm``).
    """
    used = {name for name, _, kind in _uses(model.graph) if kind == "tensor"}
    used |= {o.name for o in model.graph.output}
    floats = [i.name for i in model.graph.initializer if i.data_type in _FLOATS and i.name in used]
    kinds = {v.name: p.value for v in model.graph.value_info for p in v.metadata_props if p.key == _KIND}
    if "PARAMETER" not in kinds.values():
        return floats
    matrices = {i.name for i in model.graph.initializer if len(i.dims) == 2}
    folded = set()
    for info in model.graph.value_info:
        for note in info.metadata_props:
            if note.key == _FOLDED:
                sources = ast.literal_eval(note.value)
                # the exporter's own values have no dot in their names
                if any("." in s for s in sources) or (len(sources) == 1 and info.name in matrices):
                    folded.add(info.name)
    return [name for name in floats if kinds.get(name) == "PARAMETER" or name in folded]


def state_initializers(model: onnx.ModelProto) -> list[str]:
    """Names of initializers that a training run changes: running statistics."""
    state = {name for name, _, kind in _uses(model.graph) if kind == "state"}
    return [i.name for i in model.graph.initializer if i.name in state]
