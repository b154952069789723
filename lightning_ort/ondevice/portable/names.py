"""Names in the portable files besides those of parameters and buffers."""

from __future__ import annotations

__all__ = ["LEARNING_RATE", "NEW", "STEP", "moment_name"]

LEARNING_RATE = "optimizer/learning_rate"
STEP = "optimizer/step"
NEW = "new/"
"""prefix of an output that is the next value of the input of that name"""


def moment_name(state: str, parameter: str) -> str:
    """Of one optimizer state of one parameter."""
    return f"optimizer/{state}/{parameter}"
