"""Which sizes of a step's data will change, so that its first graph has them open already."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_ort.compiler.contest import learns
from lightning_ort.compiler.dynamo import marked_open
from lightning_ort.files.cache import Cache
from lightning_ort.lightning_packages import pl

__all__ = ["OpenSizes", "makes_batches_its_own_way", "smaller_at_the_end"]

_DEEPEST = 8
"""levels of a batch that are looked into"""

_STAGES = {"training_step": "train", "validation_step": "val", "test_step": "test", "predict_step": "predict"}

Sizes = list[list[int | None]]
"""per tensor of a batch its sizes, ``None`` for one that changes"""


class OpenSizes:
    """Knows of the sizes of a module's data from its loaders, from its other steps, and from earlier runs.

    Without it, a step is compiled for its first batch alone, and again, for batches of many sizes, when a second one
    differs: the last batch of an epoch, or the first longer sentence.

    Args:
        module: whose steps are compiled.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._owner = _owner(type(module))
        self._cache = Cache("sizes")
        self._of_step: dict[str, dict[str, Sizes]] = {}

    @contextlib.contextmanager
    def expecting(self, step: str, arguments: Any, trainer: pl.Trainer | None) -> Iterator[None]:
        """In one of the first calls of ``step``: what is compiled has those sizes open that are going to change."""
        tensors = list(tensors_of(arguments))
        kind, present = _kind(tensors), [list(x.shape) for x in tensors]
        ends = None if trainer is None else smaller_at_the_end(trainer, step)
        pads = trainer is not None and makes_batches_its_own_way(trainer, step)
        open_sizes: list[tuple[torch.Tensor, int]] = []
        before = self._remembered(step, kind, present)
        others = [sizes[kind] for name, sizes in self._of_step.items() if name != step and kind in sizes]
        for i, (x, row) in enumerate(zip(tensors, present, strict=True)):
            for dim, size in enumerate(row):
                known = [sizes[i][dim] for sizes in others]
                if dim == 0 and ends is not None:
                    is_open = size in ends
                elif before is not None and before[i][dim] is None:
                    is_open = True
                else:
                    # batches of validation may be larger for good
                    is_open = None in known or (dim > 0 and any(other != size for other in known))
                    # also where an earlier run has met one length alone: its graphs are there, and as fast
                    is_open = is_open or (pads and dim == 1 and _is_text(x))
                if is_open and size > 1:  # 0 and 1 are special to broadcasting, and open in no graph
                    open_sizes.append((x, dim))
        with marked_open(open_sizes):
            yield

    def note(self, step: str, arguments: Any) -> None:
        """Take down the sizes of a batch that something was compiled for."""
        tensors = list(tensors_of(arguments))
        kind, present = _kind(tensors), [list(x.shape) for x in tensors]
        of_kind = self._of_step.setdefault(step, {})
        known = of_kind.get(kind)
        merged = _merged(known or present, present)
        of_kind[kind] = merged
        if known is not None and merged != known and learns():
            self._cache.write(self._key(step, kind), {"sizes": merged})

    def _remembered(self, step: str, kind: str, present: Sequence[Sequence[int]]) -> Sizes | None:
        """What an earlier run has found of data whose other sizes were the same."""
        if not learns():
            return None
        found = (self._cache.read(self._key(step, kind)) or {}).get("sizes")
        if not isinstance(found, list) or len(found) != len(present):
            return None
        for row, sizes in zip(found, present, strict=True):
            if not isinstance(row, list) or len(row) != len(sizes):
                return None
            if any(known is not None and known != size for known, size in zip(row, sizes, strict=True)):
                return None
        return found

    def _key(self, step: str, kind: str) -> str:
        return hashlib.sha256(f"{self._owner} {step} {kind}".encode()).hexdigest()


def _owner(kind: type) -> str:
    """A name of a class that no other script has, each of which is ``__main__`` when it runs."""
    module = getattr(kind, "__module__", "")
    if module == "__main__":
        with contextlib.suppress(TypeError, OSError):  # of a notebook's cell, or typed at a prompt
            module = os.path.abspath(inspect.getfile(kind))
    return f"{module}.{kind.__qualname__}"


def makes_batches_its_own_way(trainer: pl.Trainer, step: str) -> bool:
    """Whether a loader of ``step`` has a ``collate_fn`` of the user's: what pads texts to the longest, as a rule.

    torch's own stacks examples that are all of one size, and so do those that others call default.
    """
    functions = [getattr(loader, "collate_fn", None) for loader in _loaders_of(trainer, step)]
    names = [getattr(f, "__name__", type(f).__name__).lower() for f in functions if callable(f)]
    return any("default" not in name for name in names)


def _is_text(x: torch.Tensor) -> bool:
    """Whether a tensor of a batch may be tokens, or a mask of them."""
    return x.dim() == 2 and not (x.is_floating_point() or x.is_complex())


def smaller_at_the_end(trainer: pl.Trainer, step: str) -> Collection[int] | None:
    """Sizes of batches of which the last one of an epoch is smaller; ``None`` if a loader does not tell."""
    loaders, stage = _loaders_of(trainer, step), _STAGES.get(step)
    limit = getattr(trainer, f"limit_{stage}_batches", 1.0)
    found = set()
    for loader in loaders:
        try:
            batches, sampler = len(loader), loader.batch_sampler
            size, drop_last, rows = sampler.batch_size, sampler.drop_last, len(sampler.sampler)
        except (AttributeError, TypeError):
            return None
        count = limit if isinstance(limit, int) else int(batches * limit)
        if not drop_last and rows % size and 1 < batches <= count:
            found.add(size)
    return found if loaders else None


def _loaders_of(trainer: pl.Trainer, step: str) -> list[Any]:
    stage = _STAGES.get(step)
    if stage is None:
        return []
    return list(_loaders(getattr(trainer, f"{stage}_dataloader{'' if stage == 'train' else 's'}")))


def _loaders(given: Any, depth: int = 0) -> Iterator[Any]:
    if isinstance(given, Mapping):
        given = list(given.values())
    if isinstance(given, (list, tuple)) and depth < _DEEPEST:
        for part in given:
            yield from _loaders(part, depth + 1)
    elif given is not None:
        yield given


def tensors_of(data: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors of a batch, in order."""
    if type(data) is torch.Tensor:
        yield data
    elif depth < _DEEPEST:
        parts: Any = ()
        if isinstance(data, Mapping):
            parts = data.values()
        elif isinstance(data, (list, tuple)):
            parts = data
        elif dataclasses.is_dataclass(data) and not isinstance(data, type):
            parts = [getattr(data, field.name, None) for field in dataclasses.fields(data)]
        for part in parts:
            yield from tensors_of(part, depth + 1)


def _kind(tensors: Sequence[torch.Tensor]) -> str:
    """What batches of the same kind have in common."""
    return " ".join(f"{x.dtype}:{x.dim()}" for x in tensors)


def _merged(known: Sequence[Sequence[int | None]], present: Sequence[Sequence[int]]) -> Sizes:
    rows = zip(known, present, strict=True)
    return [[a if a == b else None for a, b in zip(row, sizes, strict=True)] for row, sizes in rows]
