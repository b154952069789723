"""The settings of torch that surround a region: autocast and the default element type."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

__all__ = ["Surroundings", "without_autocast"]


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """Settings at one moment, to compute a region under them at another.

    A region is traced, checked and computed again when its caller's ``torch.autocast`` may long be over.

    Attributes:
        autocast: per type of device, such as ``cpu``, the type that autocast computes in, or ``None`` where it is off.
        dtype: of tensors that are made without one.
    """

    autocast: dict[str, torch.dtype | None]
    dtype: torch.dtype

    @classmethod
    def present(cls) -> Surroundings:
        """What is in force now."""
        return cls(
            {kind: torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in _kinds()},
            torch.get_default_dtype(),
        )

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Compute under these settings."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with contextlib.ExitStack() as stack:
                for kind, dtype in self.autocast.items():
                    # kept casts would outlive the trace that made them; without, a weight used twice is cast twice
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=False)
                    )
                yield
        finally:
            torch.set_default_dtype(before)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Compute gradients as torch does when ``backward`` is called after the autocast has ended."""
    with contextlib.ExitStack() as stack:
        for kind in _kinds():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _kinds() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
