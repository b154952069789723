"""What ONNX Runtime says about values that an operator refuses, as an error that says it in the user's terms."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lightning_ort.errors import IndexOutOfRangeError, RefusedValueError

__all__ = ["CIRCLE", "refusal"]

CIRCLE = 5 << 60
"""In graphs where -1 is not the last position, positions are remainders of this.

What is a position stays one, -1 and its like are beyond any end, as are both ends of int64 (what becomes of infinity
and of NaN) and those of smaller types.
"""

_LONGEST = 1 << 48
"""More elements than a tensor has."""

_NODE = re.compile(r"while running \w+ node\. Name:'(.*?)' Status Message: (.*)", re.DOTALL)
_OUT_OF_RANGE = re.compile(r"out of data bounds|Out of range value in index|invalid ind(?:ex|ice) found")
_VALUE = re.compile(r"\b(?:idx|index|indice) ?= ?(-?\d+)")


def refusal(error: Exception, places: Mapping[str, str]) -> RefusedValueError | None:
    """The error to raise instead of ``error``, of a run of a session; ``None`` if it is not about values.

    Args:
        error: what ONNX Runtime raised.
        places: names of ONNX nodes, or their beginning up to a slash or a colon, to a description for users.
    """
    found = _NODE.search(str(error))
    if found is None:
        return None
    name, status = found.groups()
    scope, is_assertion, requirement = name.partition(": ")
    place = places.get(scope) or places.get(scope.split("/")[0], f"the node {scope!r} of the graph")
    if is_assertion:
        return RefusedValueError(f"{requirement.removesuffix('.')}: in {place}. Nothing was updated.")
    if not _OUT_OF_RANGE.search(status):
        return None
    return IndexOutOfRangeError(
        f"An index or a class label{_value(status)} is out of range in {place}. Nothing was updated."
    )


def _value(status: str) -> str:
    """The first one, as far as ONNX Runtime tells."""
    found = _VALUE.search(status)
    if found is None:
        return ""
    value = int(found[1])
    if CIRCLE - _LONGEST < value < CIRCLE:
        value -= CIRCLE
    return f", {value}," if abs(value) < _LONGEST else ""
