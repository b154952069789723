"""Names of users' tensors that mean something else in the files of artifacts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

__all__ = ["check_names"]


def check_names(
    meaning: Callable[[str], str | None],
    *,
    inputs: Iterable[str] = (),
    results: Iterable[str] = (),
    parameters: Iterable[str] = (),
    buffers: Iterable[str] = (),
) -> None:
    """Raise if one of the names has a meaning.

    Args:
        meaning: gets a name and says in words what it is in the graphs; ``None`` for one that is free.
        inputs: of users.
        results: that users get.
        parameters: of the model.
        buffers: of the model.

    Raises:
        ValueError: so it is; lists all.
    """
    kinds = {"Input": inputs, "Result": results, "Parameter": parameters, "Buffer": buffers}
    wrong = [
        f"{kind} {name!r} is called like {meant}"
        for kind, names in kinds.items()
        for name in names
        if (meant := meaning(name)) is not None
    ]
    if wrong:
        raise ValueError(
            f"{'; '.join(wrong)}. Rename it: a result of a module by output_names, anything else in the model."
        )
