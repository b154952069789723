"""Arguments of users, checked where they are given: the error names the argument, its value and what was expected."""

from __future__ import annotations

import errno
import math
import numbers
import os
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "choice", "first_line", "flag", "is_number", "is_plain", "is_whole", "listed", "names", "number", "path", "require",
    "shown", "single", "whole",
]  # fmt: skip

_LONGEST = 80


def shown(value: Any) -> str:
    """``value`` as an error shows it: its type where it is no number, string or ``None``, and not too much of it."""
    text = repr(value)
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."
    return text if is_plain(value) else f"{text} (a {type(value).__name__})"


def listed(names: Iterable[str], most: int = 6) -> str:
    """The first ``most`` of ``names`` between commas, and how many there are if these are not all."""
    found = list(names)
    return (", ".join(found[:most]) or "none") + (f", ... ({len(found)} in all)" if len(found) > most else "")


def first_line(message: object) -> str:
    """The first line of an error, or of its text, that says something; of an error without any, its type."""
    lines = (line.strip() for line in str(message).splitlines())
    return next(filter(None, lines), type(message).__name__ if isinstance(message, BaseException) else str(message))


def is_plain(value: Any) -> bool:
    """Whether it is a number, a bool, a string or ``None``."""
    return value is None or isinstance(value, (str, bool, numbers.Number))


def is_number(value: Any) -> bool:
    """Whether it is a real number; neither a bool nor NaN."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and bool(value == value)


def is_whole(value: Any) -> bool:
    """Whether it is an integer; no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def number(
    name: str,
    value: Any,
    *,
    low: float | None = None,
    above: float | None = None,
    below: float | None = None,
    infinite: bool = False,
    other: str = "",
) -> float:
    """``value`` as a float.

    Args:
        name: of the argument.
        value: an int or a float.
        low: the smallest that is taken.
        above: all that are taken are larger.
        below: all that are taken are smaller.
        infinite: take infinities.
        other: what else is taken, in words.

    Raises:
        TypeError: it is no number.
        ValueError: it is NaN, infinite or out of range.
    """
    words = [
        f"{word} {bound:g}" for word, bound in (("from", low), ("above", above), ("below", below)) if bound is not None
    ]
    expected = " ".join(["a number", *words])
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name}={shown(value)}: expected {expected}{other}.")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf if value > 0 else -math.inf  # type: ignore[operator]
    finite = not math.isnan(found) and (infinite or math.isfinite(found))
    if not finite:
        expected += " that is finite" if not infinite else ", not NaN"
    fits = finite and (low is None or found >= low) and (above is None or found > above)
    if not fits or (below is not None and found >= below):
        raise ValueError(f"{name}={shown(value)}: expected {expected}{other}.")
    return found


def single(value: Any) -> Any:
    """The number of a tensor that holds one; all else as it is."""
    return value.item() if callable(getattr(value, "numel", None)) and value.numel() == 1 else value


def whole(name: str, value: Any, *, low: int, high: int | None = None) -> int:
    """``value`` as an int.

    Raises:
        TypeError: it is no integer.
        ValueError: it is less than ``low`` or more than ``high``.
    """
    expected = f"an integer from {low}" + ("" if high is None else f" to {high}")
    if not is_whole(value):
        raise TypeError(f"{name}={shown(value)}: expected {expected}.")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}={shown(value)}: expected {expected}.")
    return int(value)


def flag(name: str, value: Any) -> bool:
    """``value``, which is ``True`` or ``False``.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={shown(value)}: expected True or False.")
    return value


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """``value``, which is one of the strings ``allowed``.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, str) or value not in allowed:
        listed = [repr(a) for a in allowed]
        *most, last = listed
        expected = f"{', '.join(most)} or {last}" if most else last
        raise ValueError(f"{name}={shown(value)}: expected {expected}.")
    return value


def names(name: str, value: Any) -> list[str]:
    """A list, tuple, set or other collection of strings as a list.

    Raises:
        TypeError: it is one string, or no collection of strings.
    """
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name}={shown(value)} is one name: expected a list of names, as in [{shown(value)}].")
    if not isinstance(value, Iterable):
        raise TypeError(f"{name}={shown(value)}: expected a list of names.")
    found = list(value)
    for one in found:
        if not isinstance(one, str):
            raise TypeError(f"{name} holds {shown(one)}: expected names, which are strings.")
    return found


def path(name: str, value: Any) -> str:
    """A path as a string.

    Raises:
        TypeError: it is none.
        ValueError: it is empty, too long, or holds a NUL.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}={shown(value)}: expected a path.")
    found = os.fspath(value)
    if not isinstance(found, str):
        raise TypeError(f"{name}={shown(value)}: expected a path as a string.")
    if not found or "\0" in found:
        raise ValueError(f"{name}={shown(value)}: expected the path of a file or folder.")
    try:
        os.lstat(found)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError(f"{name}={shown(value)}: the path is too long.") from None
    return found


def require(condition: bool, message: str) -> None:
    """What ``assert`` does, also under ``python -O``: for refusals that scripts know as an AssertionError."""
    if not condition:
        raise AssertionError(message)
