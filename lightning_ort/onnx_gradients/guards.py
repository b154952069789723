"""Whether what was decided by a size while tracing matters to the result."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.trace import Traced

__all__ = ["holds_for"]

aten = torch.ops.aten


def holds_for(traced: Traced, other: Traced) -> bool:
    """Whether ``traced`` computes the same as ``other`` at the sizes with which ``other`` was traced.

    Both are graphs of one function; torch decides by sizes mostly which way to compute the same.
    """
    if _text(traced.graph) == _text(other.graph):
        return True
    generator = torch.Generator().manual_seed(0)
    inputs = [_example(n.meta["val"], generator) for n in other.graph.nodes if n.op == "placeholder"]
    with torch.no_grad():
        try:
            results = zip(_run(traced, inputs), _run(other, inputs), strict=True)
        except RuntimeError:
            return False
    return all(a.shape == b.shape and torch.allclose(a, b, 1e-4, 1e-5, equal_nan=True) for a, b in results)


def _text(graph: fx.Graph) -> str:
    return "\n".join(f"{n.name} {n.target} {n.args} {n.kwargs}" for n in graph.nodes)


def _example(fake: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random floats, and zeros, which are valid indices and classes."""
    shape = [s if isinstance(s, int) else s.node.hint for s in fake.shape]
    if fake.is_floating_point():
        return torch.rand(shape, dtype=fake.dtype, generator=generator)
    return torch.zeros(shape, dtype=fake.dtype)


def _run(traced: Traced, inputs: list[torch.Tensor]) -> list[Any]:
    return _Replay(traced.module).run(*inputs)


class _Replay(fx.Interpreter):
    """Runs a functional graph, whose tensors have lost the strides that views rely on."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        target = aten.reshape.default if target == aten.view.default else target
        return super().call_function(target, args, kwargs)
