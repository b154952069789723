"""Objects that stand in for parts of a LightningModule while a step runs, so that a step is one graph.

``self.log`` and ``self.outputs.append`` are Python that Dynamo cannot put into a graph, or that makes it compile
again for every length of the list. The stand-ins only collect, which it can follow; what they collected reaches
Lightning and the list when the step has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSequence
from typing import Any

import torch

__all__ = ["GrowingList", "LogRecorder"]


def _snapshot(value: Any) -> Any:
    """What a logged value is now: the step may go on to change the tensor in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _snapshot(v) for k, v in value.items()}
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(v) for v in value.values())
    return isinstance(value, (torch.Tensor, int, float))


class LogRecorder:
    """Stands in for ``log`` and ``log_dict``.

    Args:
        log: the module's own method.
        log_dict: the module's own method.
    """

    def __init__(self, log: Callable[..., None], log_dict: Callable[..., None]) -> None:
        self._calls: list[tuple[bool, Any, Any, Any, Any]] = []
        self._log, self._log_dict = log, log_dict
        why = "logging a metric object is plain Python"
        self._log_now = torch.compiler.disable(log, reason=why)
        self._log_dict_now = torch.compiler.disable(log_dict, reason=why)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Collect; a metric object is logged at once, because its state is what counts."""
        if _is_plain(value):
            self._calls.append((False, name, _snapshot(value), args, kwargs))
        else:
            self._log_now(name, value, *args, **kwargs)

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        """Collect, as :meth:`log` does."""
        if isinstance(dictionary, dict) and _is_plain(dictionary):
            self._calls.append((True, None, _snapshot(dictionary), args, kwargs))
        else:
            self._log_dict_now(dictionary, *args, **kwargs)

    def flush(self) -> None:
        """Hand everything to Lightning, in order."""
        if not self._calls:
            return
        calls, self._calls = self._calls, []
        for is_dict, name, value, args, kwargs in calls:
            if is_dict:
                self._log_dict(value, *args, **kwargs)
            else:
                self._log(name, value, *args, **kwargs)

    def discard(self) -> None:
        """Forget what was collected, after a step that failed."""
        self._calls = []


class GrowingList(MutableSequence):  # type: ignore[type-arg]
    """Stands in for a list attribute that grows from step to step.

    Appending collects in a short list of this step; everything else acts on the real list, outside of the graph.

    Args:
        real: the list that is stood in for.
    """

    def __init__(self, real: list[Any]) -> None:
        self.real = real
        self._fresh: list[Any] = []

    def append(self, value: Any) -> None:
        self._fresh.append(value)

    def flush(self) -> None:
        """Move what was collected to the real list."""
        if self._fresh:
            fresh, self._fresh = self._fresh, []
            self.real.extend(fresh)

    @torch.compiler.disable
    def whole(self) -> list[Any]:
        """The real list with all that was appended."""
        self.flush()
        return self.real

    @torch.compiler.disable
    def __getitem__(self, index: Any) -> Any:
        return self.whole()[index]

    @torch.compiler.disable
    def __setitem__(self, index: Any, value: Any) -> None:
        self.whole()[index] = value

    @torch.compiler.disable
    def __delitem__(self, index: Any) -> None:
        del self.whole()[index]

    @torch.compiler.disable
    def __len__(self) -> int:
        return len(self.whole())

    @torch.compiler.disable
    def __iter__(self) -> Iterator[Any]:
        return iter(self.whole())

    @torch.compiler.disable
    def insert(self, index: int, value: Any) -> None:
        self.whole().insert(index, value)

    @torch.compiler.disable
    def extend(self, values: Iterable[Any]) -> None:
        self.whole().extend(values)

    @torch.compiler.disable
    def clear(self) -> None:
        self.whole().clear()

    @torch.compiler.disable
    def pop(self, index: int = -1) -> Any:
        return self.whole().pop(index)

    @torch.compiler.disable
    def sort(self, **kwargs: Any) -> None:
        self.whole().sort(**kwargs)

    @torch.compiler.disable
    def copy(self) -> list[Any]:
        return self.whole().copy()

    @torch.compiler.disable
    def __add__(self, other: Any) -> list[Any]:
        return self.whole() + other

    @torch.compiler.disable
    def __iadd__(self, values: Iterable[Any]) -> GrowingList:  # type: ignore[override,misc]
        self.whole().extend(values)
        return self

    @torch.compiler.disable
    def __eq__(self, other: object) -> bool:
        return self.whole() == (other.whole() if isinstance(other, GrowingList) else other)

    __hash__ = None  # type: ignore[assignment]
