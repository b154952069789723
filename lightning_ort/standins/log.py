"""Stands in for ``self.log`` while a step runs, so that logging does not break its graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["LogRecorder"]


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
        self._log_now = torch.compiler.disable(self._after_flush(log), reason=why)
        self._log_dict_now = torch.compiler.disable(self._after_flush(log_dict), reason=why)

    def _after_flush(self, method: Callable[..., None]) -> Callable[..., None]:
        """``method`` called in order: what was collected before comes first."""

        def call(*args: Any, **kwargs: Any) -> None:
            self.flush()
            method(*args, **kwargs)

        return call

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
