"""Which of several ways was the fastest, by the times that were taken of them; no matter what they are.

Apart from :mod:`.contest`, which needs ONNX Runtime: without it, the package is imported and says what to install.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

__all__ = ["MARGIN", "Choice", "usual"]

MARGIN = 0.03
"""the share of its time by which another one must be faster than ONNX Runtime, or one thread than all, to be taken"""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a race has shown.

    Attributes:
        executor: the one that was taken.
        milliseconds: per candidate that of one run.
        failed: per candidate that could not take part why it could not; not remembered.
    """

    executor: str
    milliseconds: Mapping[str, float]
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def among(cls, seconds: Mapping[str, float], favourite: str, margin: float = MARGIN) -> Choice:
        """The fastest one, or ``favourite`` if no other is faster by more than the share ``margin`` of its time."""
        fastest = min(seconds, key=seconds.__getitem__)
        if seconds[fastest] >= (1 - margin) * seconds[favourite]:
            fastest = favourite
        return cls(fastest, {name: round(1e3 * t, 4) for name, t in seconds.items()})


def usual(times: Sequence[float]) -> float:
    """Seconds of a call that nothing has disturbed: what else the machine does only ever adds to a call."""
    return sorted(times)[len(times) // 4]
