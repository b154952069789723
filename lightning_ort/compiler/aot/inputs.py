"""Fake tensors for the inputs of an ONNX graph: sizes that the file leaves open are symbolic."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import onnx
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from lightning_ort.errors import UnsupportedError
from lightning_ort.onnx_reader.values import dtype_from

__all__ = ["HINTS", "Fakes", "InputInfo", "input_infos"]

HINTS = (
    (7, 11, 13, 17, 19, 23, 29, 31),
    (32, 48, 80, 112, 176, 208, 272, 304),
    (24, 40, 56, 72, 88, 104, 120, 136),
)
"""Sizes with which symbolic ones are traced, different for each: primes, and, for graphs in which sizes must be
divisible, multiples of 16 and of 8."""


@dataclasses.dataclass(frozen=True)
class InputInfo:
    """One input of a graph.

    Attributes:
        shape: a number for a fixed size, a string for one that varies; equal strings are equal sizes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]


def input_infos(model: onnx.ModelProto) -> list[InputInfo]:
    """The inputs of ``model`` that are no initializers.

    Raises:
        UnsupportedError: an input is no tensor, or its number of dimensions is not given.
    """
    initializers = {i.name for i in model.graph.initializer}
    found = []
    for value in model.graph.input:
        if value.name in initializers:
            continue
        kind = value.type.tensor_type
        if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
            raise UnsupportedError(
                f"Graph input {value.name!r} has no known number of dimensions; declare its shape in the ONNX file "
                "(sizes that vary may be names)."
            )
        shape = tuple(
            d.dim_value if d.HasField("dim_value") else (d.dim_param or f"{value.name}[{i}]")
            for i, d in enumerate(kind.shape.dim)
        )
        found.append(InputInfo(value.name, dtype_from(kind.elem_type), shape))
    return found


class Fakes:
    """A fake mode with one symbol for each varying size, and the fake ``inputs``.

    Args:
        hints: what varying sizes are while the graph is traced.
    """

    def __init__(self, infos: Sequence[InputInfo], hints: Sequence[int]) -> None:
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        names = dict.fromkeys(s for info in infos for s in info.shape if isinstance(s, str))
        if len(names) > len(hints):
            raise UnsupportedError(
                f"The graph inputs have {len(names)} sizes that vary ({', '.join(names)}), at most {len(hints)} are "
                "expected. Declare those that do not vary as numbers."
            )
        self.hints = dict(zip(names, hints, strict=False))
        self._count = 0
        self._sizes: dict[str, torch.SymInt | int] = {}
        self.inputs = [self._input(info) for info in infos]

    def _input(self, info: InputInfo) -> torch.Tensor:
        # sizes with the same hint share a symbol
        varies = [isinstance(s, str) for s in info.shape]
        fake = self.fake([self.hints[s] if isinstance(s, str) else s for s in info.shape], info.dtype, varies)
        for s, size in zip(info.shape, fake.shape, strict=True):
            if isinstance(s, str):
                self._sizes.setdefault(s, size)
        return fake

    def fake(self, shape: Sequence[int], dtype: torch.dtype, varies: Sequence[bool]) -> torch.Tensor:
        """A fake CPU tensor of ``shape``; sizes that vary are symbolic."""
        self._count += 1
        kinds = [DimDynamic.DUCK if v else DimDynamic.STATIC for v in varies]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds, constraint_sizes=[None] * len(kinds))
        tensor, source = torch.empty(list(shape), dtype=dtype), ConstantSource(f"tensor_{self._count}")
        return self.mode.from_tensor(tensor, symbolic_context=context, source=source)

    def fake_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake input shaped like ``tensor``; sizes that vary there vary with the same symbols."""
        sizes = [s if isinstance(s, int) else s.node.hint for s in tensor.shape]
        return self.fake(sizes, tensor.dtype, [not isinstance(s, int) for s in tensor.shape])

    def fixed(self) -> dict[str, int]:
        """Varying sizes that have turned out to be a number: a graph traced with these holds for nothing else."""
        found = {}
        for name, size in self._sizes.items():
            expression = self.env.simplify(size.node.expr) if isinstance(size, torch.SymInt) else size
            if isinstance(expression, int) or expression.is_number:
                found[name] = int(expression)
        return found
