"""Whether a graph that was traced at some sizes computes the same thing at others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from lightning_ort.compiler.trace import Traced
from lightning_ort.verification import is_same_function

__all__ = ["holds_for", "other_sizes", "satisfied"]

aten = torch.ops.aten

_TRIED = (1, *range(2, 34), *(2**n + d for n in range(5, 13) for d in (-1, 0, 1)), 100, 101, 200, 1000, 1001)
"""Sizes among which some are looked for that a condition excludes."""

_MOST = 8
"""Combinations of sizes at which a graph is traced again; each takes as long as the first time."""

_LARGEST = 1 << 22
"""Elements of the largest input at which two graphs are compared."""


def satisfied(conditions: Sequence[sympy.Basic], names: Mapping[str, str], sizes: Mapping[str, int]) -> bool:
    """Whether ``conditions`` hold at ``sizes``.

    Args:
        conditions: of torch's symbols.
        names: of the sizes, by symbol.
        sizes: by name.
    """
    for condition in conditions:
        value = condition.xreplace({s: sympy.Integer(sizes[names[str(s)]]) for s in condition.free_symbols})
        if value != sympy.true:
            return False
    return True


def other_sizes(
    conditions: Sequence[sympy.Basic], names: Mapping[str, str], sizes: Mapping[str, int]
) -> Iterator[dict[str, int]]:
    """Sizes that some condition excludes: those next to the given ones, and the smallest, one of them changed.

    Args:
        conditions: what was assumed at ``sizes``, of torch's symbols.
        names: of the sizes, by symbol.
        sizes: by name.
    """
    seen: set[tuple[int, ...]] = set()
    for condition in conditions:
        for symbol in sorted(condition.free_symbols, key=str):
            name = names.get(str(symbol))
            if name is None:
                continue
            excluded = []
            for size in _TRIED:
                try:
                    if not satisfied([condition], names, {**sizes, name: size}):
                        excluded.append(size)
                except (ArithmeticError, ValueError):
                    continue  # a quotient by nothing
            below = [size for size in excluded if size < sizes[name]]
            above = [size for size in excluded if size > sizes[name]]
            for size in (*below[-1:], *above[:1], *below[:1], *above[1:2]):
                other = {**sizes, name: size}
                if tuple(other.values()) not in seen and len(seen) < _MOST:
                    seen.add(tuple(other.values()))
                    yield other


def holds_for(traced: Traced, other: Traced) -> bool | None:
    """Whether ``traced`` computes the same as ``other`` at the sizes with which ``other`` was traced.

    Both are graphs of one function; torch decides by sizes mostly which way to compute the same. ``None`` where that
    cannot be told: these sizes are none for ``other``, or too large.
    """
    if _text(traced.graph) == _text(other.graph):
        return True
    generator = torch.Generator().manual_seed(0)
    placeholders = [n.meta["val"] for n in other.graph.nodes if n.op == "placeholder"]
    if any(_sizes(fake).numel() > _LARGEST for fake in placeholders):
        return None
    inputs = [_example(fake, generator) for fake in placeholders]
    with torch.no_grad():
        try:
            wanted = _run(other, inputs)
        except (RuntimeError, IndexError, ValueError):
            return None
        try:
            got = _run(traced, inputs)
        except (RuntimeError, IndexError, ValueError):
            return False
    return all(is_same_function(a, b) for a, b in zip(got, wanted, strict=True))


def _text(graph: fx.Graph) -> str:
    return "\n".join(f"{n.name} {n.target} {n.args} {n.kwargs}" for n in graph.nodes)


def _sizes(fake: torch.Tensor) -> torch.Size:
    return torch.Size([s if isinstance(s, int) else s.node.hint for s in fake.shape])


def _example(fake: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random floats, and zeros, which are valid indices and classes."""
    if fake.is_floating_point():
        return torch.rand(_sizes(fake), dtype=fake.dtype, generator=generator)
    return torch.zeros(_sizes(fake), dtype=fake.dtype)


def _run(traced: Traced, inputs: list[torch.Tensor]) -> list[Any]:
    return _Replay(traced.module).run(*inputs)


_WRITING_AT_INDICES: dict[Any, int] = {
    aten.max_pool2d_with_indices_backward.default: 2,
    aten.max_pool3d_with_indices_backward.default: 3,
}
"""Kernels that write wherever their last argument says, and the dimensions that it counts through."""


def _check_within(indices: torch.Tensor, shape: torch.Size) -> None:
    """
    Raises:
        IndexError: a window lies in the padding alone, as at sizes that are too small; memory would be overwritten.
    """
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < shape.numel():
        raise IndexError(f"an index lies outside of the image of {tuple(shape)}")


class _Replay(fx.Interpreter):
    """Runs a functional graph, whose tensors have lost the strides that views rely on."""

    def call_function(self, target: Callable[..., Any] | str, args: Any, kwargs: Any) -> Any:
        target = aten.reshape.default if target == aten.view.default else target
        if target in _WRITING_AT_INDICES:
            _check_within(args[-1], args[1].shape[-_WRITING_AT_INDICES[target] :])
        return super().call_function(target, args, kwargs)
