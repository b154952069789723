"""Which weight of an ORTTrainer is which of a LightningModule."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lightning_ort.errors import CheckpointError

__all__ = ["find_prefix"]


def find_prefix(inner: Collection[str], outer: Collection[str], prefix: str | None, where: str) -> str:
    """What to put before each name of ``inner`` to have names of ``outer``.

    A LightningModule whose attribute ``net`` is what an ORTTrainer trains has the trainer's names after ``net.``.

    Args:
        inner: the trainer's names.
        outer: the LightningModule's names.
        prefix: what the user has said; ``None`` to find it.
        where: which file and which direction, for messages.

    Returns:
        An empty string if the names are the same.

    Raises:
        CheckpointError: no prefix gives every name, or several do.
    """
    outside = set(outer)
    if prefix is not None:
        missing = [name for name in inner if prefix + name not in outside]
        if missing:
            raise CheckpointError(f"{where}: with prefix={prefix!r} these have no counterpart: {_some(missing)}.")
        return prefix
    if all(name in outside for name in inner):
        return ""
    # each prefix that fits must give the first name
    first = next(iter(inner))
    candidates = [name[: -len(first)] for name in outer if name.endswith(f".{first}")]
    fitting = [p for p in candidates if all(p + name in outside for name in inner)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise CheckpointError(
            f"{where}: the names fit after each of {', '.join(map(repr, fitting))}. Say which is meant by prefix=..."
        )
    best = min([*candidates, ""], key=lambda p: sum(p + name not in outside for name in inner))
    missing = [name for name in inner if best + name not in outside]
    after = f" after {best!r}" if best else ""
    raise CheckpointError(
        f"{where}: {len(missing)} of {len(inner)} weights of the ORTTrainer have no counterpart{after}: "
        f"{_some(missing)}. The LightningModule has {_some(outer)}."
    )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:8]) + (f" ... ({len(listed)} in all)" if len(listed) > 8 else "")
