"""Which nodes compute with sizes, and what comes out: decided from the graph alone, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_ort.onnx_reader import numbers
from lightning_ort.onnx_reader.values import Constant, Number, Value

__all__ = ["dtype_of", "length_of", "number_type"]

_COMPARISONS = {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Not"}
_ELEMENTWISE = _COMPARISONS | {
    "Add", "Sub", "Mul", "Div", "Mod", "Pow", "Neg", "Abs", "Floor", "Ceil", "Sqrt", "Where", "Max", "Min", "Cast",
}  # fmt: skip
_MOVING = {"Concat", "Gather", "Reshape", "Slice", "Unsqueeze"}
"""They look at no number but those that say from where to where."""
_REDUCTIONS = {"ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin"}


def number_type(
    op_type: str, inputs: Sequence[Value | None], attributes: dict[str, Any]
) -> tuple[str, torch.dtype, int] | None:
    """Name in ``NUMBER_OPERATORS``, element type and rank of the result; ``None`` for a node that computes tensors."""
    if op_type == "Shape":
        return None if isinstance(inputs[0], Constant) else ("Shape", torch.int64, 1)
    if op_type == "Size":
        return None if isinstance(inputs[0], Constant) else ("Size", torch.int64, 0)
    if op_type == "ConstantOfShape":
        (shape,) = inputs
        known = isinstance(shape, Number) and shape.of_sizes
        return (op_type, attributes.get("value", (0.0, torch.float32))[1], 1) if known else None
    present = [v for v in inputs if v is not None]
    if op_type not in numbers.NUMBER_OPERATORS or not any(isinstance(v, Number) for v in present):
        return None
    if not all(isinstance(v, Number) or (isinstance(v, Constant) and v.tensor.dim() <= 1) for v in present):
        return None
    dtype, rank = dtype_of(present[0]), _rank(present[0])
    if op_type in _ELEMENTWISE:
        return _elementwise(op_type, present, attributes)
    if op_type in _REDUCTIONS:
        return op_type, dtype, rank if attributes.get("keepdims", 1) else 0
    if op_type == "Gather":
        return (op_type, dtype, _rank(present[1])) if rank == 1 else None
    if op_type == "Squeeze":
        return op_type, dtype, 0
    if op_type == "Unsqueeze":
        return (op_type, dtype, 1) if rank == 0 and _length(present[1]) in (0, 1) else None
    if op_type == "Reshape":
        length = _length(present[1])
        return (op_type, dtype, length) if length in (0, 1) else None
    if op_type == "Flatten":
        return None
    return op_type, dtype, 1  # Concat, Slice


def _elementwise(
    op_type: str, present: Sequence[Value], attributes: dict[str, Any]
) -> tuple[str, torch.dtype, int] | None:
    rank = max(_rank(v) for v in present)
    dtype = dtype_of(present[1] if op_type == "Where" else present[0])
    name = op_type
    if op_type in _COMPARISONS:
        dtype = torch.bool
    elif op_type == "Cast":
        dtype = attributes["to"]
    elif dtype.is_floating_point and op_type in ("Mul", "Div", "Pow", "Add", "Sub"):
        # float32 would round where Python's numbers do not
        if not all(numbers.is_exact(numbers.as_number(v.tensor)) for v in present if isinstance(v, Constant)):
            return None
        name = "TrueDiv" if op_type == "Div" else op_type
    return name, dtype, rank


def length_of(name: str, inputs: Sequence[Value | None], attributes: dict[str, Any]) -> int | None:
    """Number of entries of a list of numbers, where it is known whatever they are; else ``None``."""
    if name not in _MOVING:
        return None
    moved = inputs if name == "Concat" else inputs[:1]
    if any(isinstance(v, Number) and ((v.length is None and v.rank) or v not in moved) for v in inputs):
        return None
    arguments: list[Any] = [numbers.as_number(v.tensor) if isinstance(v, Constant) else None for v in inputs]
    for i, value in enumerate(inputs):
        if isinstance(value, Number) and value.length is not None:
            arguments[i] = [None] * value.length
    result = numbers.NUMBER_OPERATORS[name](*arguments, **attributes)
    return len(result) if isinstance(result, list) else None


def dtype_of(value: Value | None) -> torch.dtype:
    """Element type of a constant or a number."""
    assert isinstance(value, (Constant, Number))
    return value.tensor.dtype if isinstance(value, Constant) else value.dtype


def _rank(value: Value) -> int:
    assert isinstance(value, (Constant, Number))
    return value.tensor.dim() if isinstance(value, Constant) else value.rank


def _length(value: Value) -> int | None:
    """Number of elements of a constant; ``None`` when it is computed."""
    return value.tensor.numel() if isinstance(value, Constant) else None
