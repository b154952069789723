"""ONNX operators on sizes: Python numbers and flat lists of them, which may be symbolic.

What a graph computes from ``Shape`` with these operators never becomes a tensor. A scalar is a number, a vector a
list; whole numbers stay whole, also where ONNX casts them to float and back. What compares sizes that are open is
computed as well, a number that is 1 or 0: an answer for the sizes of a trace would be one for these alone.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from lightning_ort.onnx_reader.values import Constant, Number, Value

__all__ = ["NUMBER_OPERATORS", "as_number", "as_tensor", "dtype_of", "length_of", "number_type"]

Numbers = Any
"""a number or a list of numbers"""

NUMBER_OPERATORS: dict[str, Callable[..., Any]] = {}


def _numbers(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            NUMBER_OPERATORS[name] = function
        return function

    return register


def as_tensor(value: Numbers, dtype: torch.dtype, like: torch.Tensor | None) -> torch.Tensor:
    """A tensor of ``value``, on the device of ``like``."""
    device = None if like is None else like.device
    if isinstance(value, (list, tuple)):
        if not value:
            return torch.zeros(0, dtype=dtype, device=device)
        return torch.stack([as_tensor(v, dtype, like) for v in value])
    if dtype == torch.bool and isinstance(value, torch.SymInt):
        return as_tensor(value, torch.int64, like) != 0
    return torch.full((), value, dtype=dtype, device=device)


def as_number(tensor: torch.Tensor) -> Numbers:
    """A constant of rank 0 or 1 as a number or a list, whole where it is whole."""

    def whole(v: Any) -> Any:
        return int(v) if isinstance(v, float) and v.is_integer() else v

    values = tensor.tolist()
    return [whole(v) for v in values] if isinstance(values, list) else whole(values)


def _is_exact(value: Numbers) -> bool:
    """Whether products with sizes are the same in float32 and in float64: at most ten binary places."""
    values = value if isinstance(value, list) else [value]
    return all(math.isfinite(v) and float(v * 1024).is_integer() for v in values)


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(*operands: Numbers) -> Numbers:
        lengths = [len(v) for v in operands if isinstance(v, (list, tuple))]
        if not lengths:
            return function(*operands)
        length = next((n for n in lengths if n != 1), 1)
        columns = [
            (list(v) * length if len(v) == 1 else list(v)) if isinstance(v, (list, tuple)) else [v] * length
            for v in operands
        ]
        return [function(*row) for row in zip(*columns, strict=True)]

    return apply


def _divide(a: Any, b: Any) -> Any:
    """Whole numbers are divided towards zero, as ONNX does for integers."""
    if _is_open(a, b) and _known(b > 0):
        if _known(a >= 0):
            return a // b
        if _known(a <= 0):
            return -(-a // b)
    quotient = abs(a) // abs(b)
    return quotient if bool(a >= 0) == bool(b > 0) else -quotient


def _fmod(a: Any, b: Any) -> Any:
    return a - _divide(a, b) * b


def _true_divide(a: Any, b: Any) -> Any:
    return a // b if a % b == 0 else a / b


def _floor(a: Any) -> Any:
    return a if isinstance(a, (int, torch.SymInt)) else math.floor(a)


def _ceil(a: Any) -> Any:
    return a if isinstance(a, (int, torch.SymInt)) else math.ceil(a)


def _is_open(*values: Any) -> bool:
    """Whether some of whole numbers is symbolic, where what is computed from it can be as well.

    Dynamo compiles anew where the answer to a comparison is another one.
    """
    whole = all(isinstance(v, (int, torch.SymInt)) for v in values)
    return whole and any(isinstance(v, torch.SymInt) for v in values) and not torch.compiler.is_dynamo_compiling()


def _known(answer: Any) -> bool | None:
    """The answer to a comparison of sizes if it is the same for all of them, from 1 upwards."""
    if not isinstance(answer, torch.SymBool):
        return bool(answer)
    expression = answer.node.expr
    bounds = bound_sympy(expression, {s: ValueRanges(1, int_oo) for s in expression.free_symbols})
    return bool(bounds.lower) if bounds.is_singleton() else None


def _comparison(compare: Callable[[Any, Any], Any], computed: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``compare``, or the number that ``computed`` makes of open sizes, positive where it is true."""

    def answer(a: Any, b: Any) -> Any:
        if not _is_open(a, b):
            return bool(compare(a, b))
        known = _known(compare(a, b))
        return torch.sym_min(torch.sym_max(computed(a, b), 0), 1) if known is None else known

    return answer


_equal = _comparison(operator.eq, lambda a, b: 1 - torch.sym_max(a - b, b - a))


def _where(condition: Any, a: Any, b: Any) -> Any:
    if not _is_open(condition):
        return a if condition else b
    if all(isinstance(v, (int, torch.SymInt)) for v in (a, b)):
        return b + condition * (a - b)
    return a if bool(condition != 0) else b


def _not(a: Any) -> Any:
    return 1 - a if _is_open(a) else not a


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": _divide,
    "TrueDiv": _true_divide,
    "Pow": lambda a, b: a**b,
    "Neg": lambda a: -a,
    "Abs": lambda a: abs(a),
    "Floor": _floor,
    "Ceil": _ceil,
    "Sqrt": lambda a: torch.sym_sqrt(a) if isinstance(a, torch.SymInt) else math.sqrt(a),
    "Equal": _equal,
    "Less": _comparison(operator.lt, lambda a, b: b - a),
    "LessOrEqual": _comparison(operator.le, lambda a, b: b - a + 1),
    "Greater": _comparison(operator.gt, lambda a, b: a - b),
    "GreaterOrEqual": _comparison(operator.ge, lambda a, b: a - b + 1),
    "And": lambda a, b: torch.sym_min(a, b) if _is_open(a, b) else bool(a and b),
    "Or": lambda a, b: torch.sym_max(a, b) if _is_open(a, b) else bool(a or b),
    "Not": _not,
    "Where": _where,
}
for _name, _function in _ELEMENTWISE.items():
    NUMBER_OPERATORS[_name] = _elementwise(_function)


def _folding(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def fold(*operands: Numbers) -> Numbers:
        result = operands[0]
        for operand in operands[1:]:
            result = _elementwise(function)(result, operand)
        return result

    return fold


NUMBER_OPERATORS["Max"] = _folding(torch.sym_max)
NUMBER_OPERATORS["Min"] = _folding(torch.sym_min)


@_numbers("Mod")
def mod(a: Numbers, b: Numbers, *, fmod: int = 0) -> Numbers:
    return _elementwise(_fmod if fmod else operator.mod)(a, b)


@_numbers("ConstantOfShape")
def constant_of_shape(shape: list[int], *, value: tuple[Any, torch.dtype] = (0.0, torch.float32)) -> list[Any]:
    return [value[0]] * shape[0]


@_numbers("Cast")
def cast(value: Numbers, *, to: torch.dtype) -> Numbers:
    def convert(v: Any) -> Any:
        if to == torch.bool:
            return _not(_equal(v, 0))
        if isinstance(v, bool):
            return int(v)
        if to.is_floating_point or isinstance(v, (int, torch.SymInt)):
            return v
        return math.trunc(v)

    return [convert(v) for v in value] if isinstance(value, (list, tuple)) else convert(value)


@_numbers("Gather")
def gather(values: list[Any], index: Numbers, *, axis: int = 0) -> Numbers:
    return [values[i] for i in index] if isinstance(index, (list, tuple)) else values[index]


@_numbers("Concat")
def concat(*parts: list[Any], axis: int) -> list[Any]:
    return [v for part in parts for v in part]


@_numbers("Slice")
def slice_(values: list[Any], starts: list[int], ends: list[int], axes: Any = None, steps: Any = None) -> list[Any]:
    step = steps[0] if steps else 1
    start, end = starts[0], ends[0]
    if step < 0 and end < -len(values):
        return values[start::step]
    return values[start:end:step]


@_numbers("Squeeze")
def squeeze(value: Numbers, axes: Any = None) -> Any:
    if not isinstance(value, (list, tuple)):
        return value
    if axes is None and len(value) != 1:
        return value
    (number,) = value
    return number


@_numbers("Unsqueeze")
def unsqueeze(value: Any, axes: list[int]) -> list[Any]:
    return [value]


@_numbers("Reshape")
def reshape(value: Numbers, shape: list[int], *, allowzero: int = 0) -> Numbers:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values if shape else values[0]


@_numbers("Transpose")
def transpose(value: Numbers, *, perm: Any = None) -> Numbers:
    return value


@_numbers("Expand")
def expand(value: Numbers, shape: list[int]) -> Numbers:
    values = value if isinstance(value, (list, tuple)) else [value]
    if not shape:
        return value
    return list(values) * shape[0] if len(values) == 1 else list(values)


@_numbers("Tile")
def tile(value: Numbers, repeats: list[int]) -> Numbers:
    return list(value) * repeats[0] if repeats else value


@_numbers("Split")
def split(
    values: list[Any], split: Any = None, *, axis: int = 0, num_outputs: int | None = None, n_outputs: int
) -> list[list[Any]]:
    parts = num_outputs or n_outputs
    lengths = split or [-(-len(values) // parts)] * parts  # the last one is as long as what is left
    ends = itertools.accumulate(lengths)
    return [list(values[end - n : end]) for end, n in zip(ends, lengths, strict=True)]


def _reduction(function: Callable[[Any, Any], Any], start: Any) -> Callable[..., Any]:
    def reduce(values: Sequence[Any], axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Any:
        rest = list(values)
        if noop_with_empty_axes and not axes:
            return rest
        result = rest.pop(0) if rest else start
        for v in rest:
            result = function(result, v)
        return [result] if keepdims else result

    return reduce


NUMBER_OPERATORS["ReduceProd"] = _reduction(lambda a, b: a * b, 1)
NUMBER_OPERATORS["ReduceSum"] = _reduction(lambda a, b: a + b, 0)
NUMBER_OPERATORS["ReduceMax"] = _reduction(torch.sym_max, 0)
NUMBER_OPERATORS["ReduceMin"] = _reduction(torch.sym_min, 0)


_COMPARISONS = {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Not"}
_ELEMENTWISE_TYPES = _COMPARISONS | {
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
    if op_type not in NUMBER_OPERATORS or not any(isinstance(v, Number) for v in present):
        return None
    if not all(isinstance(v, Number) or (isinstance(v, Constant) and v.tensor.dim() <= 1) for v in present):
        return None
    dtype, rank = dtype_of(present[0]), _rank(present[0])
    if op_type in _ELEMENTWISE_TYPES:
        return _elementwise_type(op_type, present, attributes)
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
    if op_type == "Transpose":
        return op_type, dtype, rank
    if op_type == "Expand":
        shape = present[1]
        length = 1 if isinstance(shape, Number) and shape.of_sizes else _length(shape)
        return (op_type, dtype, max(rank, length)) if length in (0, 1) else None
    if op_type == "Tile":
        return (op_type, dtype, rank) if _length(present[1]) == rank else None
    return op_type, dtype, 1  # Concat, Slice, Split


def _elementwise_type(
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
        if not all(_is_exact(as_number(v.tensor)) for v in present if isinstance(v, Constant)):
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
    arguments: list[Any] = [as_number(v.tensor) if isinstance(v, Constant) else None for v in inputs]
    for i, value in enumerate(inputs):
        if isinstance(value, Number) and value.length is not None:
            arguments[i] = [None] * value.length
    result = NUMBER_OPERATORS[name](*arguments, **attributes)
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
