"""Options of an ORTTrainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_ort.trainer.schema import SCHEMA, OptionsValidator, PropagateCastOpsStrategy

__all__ = ["ORTTrainerOptions", "PropagateCastOpsStrategy"]

# dictionaries whose keys are the user's
_DATA = {"provider_options", "sliced_schema", "sliced_axes"}


class _Section:
    """One level of the options, read by attributes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            nested = isinstance(value, dict) and key not in _DATA
            setattr(self, key, _Section(value) if nested else value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"options have no {name!r} here; there are {', '.join(self._items())}.")

    def _items(self) -> dict[str, Any]:
        return {
            k: v._items() if isinstance(v, _Section) else v for k, v in vars(self).items() if not k.startswith("__")
        }

    def __repr__(self) -> str:
        return repr(self._items())


class ORTTrainerOptions(_Section):
    """Settings of an :class:`~lightning_ort.ORTTrainer`, read by attributes: ``options.mixed_precision.enabled``.

    Every key has an effect or is refused when a trainer is made; ``docs/orttrainer.md`` has the table.

    Args:
        options: nested dictionary of what shall differ from the defaults.

    Raises:
        ValueError: an unknown key, or a value that the key does not take.
    """

    def __init__(self, options: Mapping[str, Any] = {}) -> None:
        given = dict(options)
        validator = OptionsValidator(SCHEMA)
        validated = validator.validated(given)
        if validated is None:
            raise ValueError(f"Invalid options: {validator.errors}")
        super().__init__({key: validated[key] for key in SCHEMA})
        self.__given = frozenset(_paths(given))

    def _was_given(self, path: str) -> bool:
        """Whether the user set the key of that dotted path, and not the defaults."""
        return path in self.__given

    def _items(self) -> dict[str, Any]:
        return {key: value for key, value in super()._items().items() if key in SCHEMA}


def _paths(options: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in options.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")
