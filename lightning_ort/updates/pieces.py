"""Parameters cut and joined into pieces of a size that suits ONNX Runtime."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

__all__ = ["CHUNK", "CHUNK_ON_GPU", "SMALL", "Part", "Piece", "pieces_of"]

CHUNK = 1 << 17
"""Elements of a piece. Each node of an update is one pass over a piece, whose tensors should stay in the cache from
one pass to the next: Adam for 3.7 million elements takes 8.7 ms in pieces of 128k, 11.3 ms in pieces of 16k (more
nodes) and 16 ms in one (Zen 4, one thread)."""

CHUNK_ON_GPU = 1 << 24
"""The same on a GPU, where what counts is how many kernels are started and how much memory a pass needs (64 MB)."""

SMALL = 1 << 14
"""Elements below which a tensor is joined with others: a node takes one or two microseconds however little it does."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Elements ``start`` to ``stop`` of parameter number ``param``, counted in memory order."""

    param: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Piece:
    """Parts of parameters of one group, updated together."""

    parts: tuple[Part, ...]
    group: int

    def __len__(self) -> int:
        return sum(map(len, self.parts))


def pieces_of(
    sizes: Sequence[int], groups: Sequence[int], *, elementwise: bool, chunk: int | None = None
) -> list[Piece]:
    """All elements of all parameters, each in exactly one piece.

    Args:
        sizes: number of elements per parameter.
        groups: number of the group per parameter.
        elementwise: whether parameters may be cut and joined.
        chunk: elements of a piece, by default :data:`CHUNK`.
    """
    chunk = chunk or CHUNK
    whole = [Part(i, 0, n) for i, n in enumerate(sizes) if n]
    if not elementwise:
        return [Piece((part,), groups[part.param]) for part in whole]
    pieces: list[Piece] = []
    joined: dict[int, list[Part]] = {}
    for part in whole:
        group = groups[part.param]
        if len(part) < SMALL:
            bucket = joined.setdefault(group, [])
            bucket.append(part)
            if sum(map(len, bucket)) >= chunk:
                pieces.append(Piece(tuple(joined.pop(group)), group))
            continue
        # pieces of nearly the same size: a short remainder would have as many nodes as a full one
        count = -(-len(part) // chunk)
        cuts = [len(part) * k // count for k in range(count + 1)]
        pieces += [Piece((Part(part.param, a, b),), group) for a, b in itertools.pairwise(cuts)]
    return pieces + [Piece(tuple(parts), group) for group, parts in joined.items()]
