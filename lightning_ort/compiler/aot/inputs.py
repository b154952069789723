"""Fake tensors for the inputs of an ONNX graph: sizes that the file leaves open are symbolic."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from lightning_ort.compiler.aot.sizes import Size, independent, value_of
from lightning_ort.errors import UnsupportedError
from lightning_ort.onnx_reader.values import dtype_from

__all__ = ["HINTS", "Fakes", "InputInfo", "info_of", "input_infos", "input_type", "is_small", "usual_hints"]

_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67)

HINTS = (
    _PRIMES,
    tuple(16 * n for n in (2, 3, 5, *_PRIMES[:-3])),
    tuple(8 * n for n in range(3, 35, 2)),
    (3, 5, 2, 4, *range(6, 18)),
    (5, 2, 3, *range(6, 19)),
)
"""Sizes with which symbolic ones are traced, different for each: primes, and, for graphs in which sizes must be
divisible, multiples of 16 and of 8; small ones, where a table such as that of positions has no more rows."""


def is_small(hints: Mapping[str, int]) -> bool:
    """Whether these are small :data:`HINTS`, one of which may be right by chance where operators fix a product."""
    return any(list(hints.values()) == [*sizes[: len(hints)]] for sizes in HINTS[-2:])


def usual_hints(names: Sequence[str]) -> list[dict[str, int]]:
    """:data:`HINTS` for the sizes called ``names``, as many as there are."""
    return [dict(zip(names, sizes, strict=False)) for sizes in HINTS]


@dataclasses.dataclass(frozen=True)
class InputInfo:
    """One input of a graph.

    Attributes:
        shape: a number for a fixed size, a string for one that varies; equal strings are equal sizes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[Size, ...]


def input_infos(model: onnx.ModelProto) -> list[InputInfo]:
    """The inputs of ``model`` that are no initializers.

    Raises:
        UnsupportedError: an input is no tensor, or its number of dimensions is not given.
    """
    initializers = {i.name for i in model.graph.initializer}
    return [info_of(value) for value in model.graph.input if value.name not in initializers]


def info_of(value: onnx.ValueInfoProto, place: str = "input") -> InputInfo:
    """What ``value``, an input of a graph or what ``place`` says, is declared to be.

    Raises:
        UnsupportedError: it is no tensor, or its number of dimensions is not given.
    """
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
        raise UnsupportedError(
            f"Graph {place} {value.name!r} has no known number of dimensions; declare its shape in the ONNX file "
            "(sizes that vary may be names)."
        )
    shape = tuple(
        d.dim_value if d.HasField("dim_value") else (d.dim_param or f"{value.name}[{i}]")
        for i, d in enumerate(kind.shape.dim)
    )
    return InputInfo(value.name, input_type(value), shape)


def input_type(value: onnx.ValueInfoProto) -> torch.dtype:
    """Element type of a graph input.

    Raises:
        UnsupportedError: torch has none such; strings, for one, which no gradient passes.
    """
    try:
        return dtype_from(value.type.tensor_type.elem_type)
    except ValueError as error:
        raise UnsupportedError(
            f"Graph input {value.name!r}: {error}. Convert it before the model, and begin the model with numbers."
        ) from None


class Fakes:
    """A fake mode with one symbol for each varying size, and the fake ``inputs``.

    Args:
        infos: the inputs; a size that is an expression of others' names is that expression of their symbols.
        hints: what varying sizes are while the graph is traced, by name.

    Raises:
        UnsupportedError: more sizes vary than there are hints, or one is no size at these hints.
    """

    def __init__(self, infos: Sequence[InputInfo], hints: Mapping[str, int]) -> None:
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        names = independent(infos)
        missing = [n for n in names if n not in hints]
        if missing:
            raise UnsupportedError(
                f"The graph inputs have {len(names)} sizes that vary ({', '.join(names)}), at most "
                f"{len(names) - len(missing)} are expected. Declare those that do not vary as numbers."
            )
        self.hints = {n: hints[n] for n in names}
        self._count = 0
        # sizes with the same hint share a symbol
        self._symbols = {n: self.fake([size], torch.float32, [True]).shape[0] for n, size in self.hints.items()}
        self.inputs = [self._input(info) for info in infos]

    def _input(self, info: InputInfo) -> torch.Tensor:
        if all(s in self.hints for s in info.shape if isinstance(s, str)):
            varies = [isinstance(s, str) for s in info.shape]
            return self.fake([self.hints[s] if isinstance(s, str) else s for s in info.shape], info.dtype, varies)
        sizes = [self._size(s) if isinstance(s, str) else s for s in info.shape]
        with self.mode:
            return torch.empty(sizes, dtype=info.dtype)

    def _size(self, size: str) -> Any:
        if size in self.hints:
            return self._symbols[size]
        if (value_of(size, self.hints) or 0) < 1:
            raise UnsupportedError(f"the size {size} cannot be traced")
        return value_of(size, self._symbols)

    def fake(self, shape: Sequence[int], dtype: torch.dtype, varies: Sequence[bool]) -> torch.Tensor:
        """A fake CPU tensor of ``shape``; sizes that vary are symbolic."""
        self._count += 1
        kinds = [DimDynamic.DUCK if v else DimDynamic.STATIC for v in varies]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds, constraint_sizes=[None] * len(kinds))
        tensor, source = torch.empty(list(shape), dtype=dtype), ConstantSource(f"tensor_{self._count}")
        return self.mode.from_tensor(tensor, symbolic_context=context, source=source)

    def fake_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake input shaped like ``tensor``; sizes that vary there vary with the same symbols."""
        with self.mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype)

    def names(self) -> dict[str, str]:
        """The symbols of varying sizes, and their names."""
        return {str(size): name for name, size in self._symbols.items()}

    def fixed(self) -> dict[str, int]:
        """Varying sizes that have turned out to be a number: a graph traced with these holds for nothing else."""
        found = {}
        for name, size in self._symbols.items():
            expression = self.env.simplify(size.node.expr) if isinstance(size, torch.SymInt) else size
            if isinstance(expression, int) or expression.is_number:
                found[name] = int(expression)
        return found
