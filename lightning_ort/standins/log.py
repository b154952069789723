"""Stands in for ``self.log`` and for the metrics while a step runs, so that neither breaks its graph."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torchmetrics import Metric, MetricCollection

__all__ = ["LogRecorder"]


def _snapshot(value: Any) -> Any:
    """What a logged value is now: the step may go on to change the tensor in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _snapshot(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)([_snapshot(v) for v in value])
    return value


def _can_wait(value: Any) -> bool:
    """Whether a snapshot of ``value`` can be used later: a metric object is looked at when the step has ended."""
    if isinstance(value, dict):
        return all(_can_wait(v) for v in value.values())
    if type(value) in (list, tuple):
        return all(_can_wait(v) for v in value)
    return value is None or isinstance(value, (torch.Tensor, int, float, str, Metric, MetricCollection))


class LogRecorder:
    """Collects what a step logs and what it gives to metrics, and does both in order when the step has ended.

    What a metric answers cannot wait: ``forward`` and ``compute`` break the graph, after everything before them was
    done.

    Args:
        log: the module's own method.
        log_dict: the module's own method.
    """

    def __init__(self, log: Callable[..., None], log_dict: Callable[..., None]) -> None:
        # entries are built from names, tensors and modules alone, which Dynamo can follow
        self._calls: list[tuple[str, Any, Any, Any, Any]] = []
        self._log, self._log_dict = log, log_dict
        self._collecting = True
        why = "what is logged is no tensor, number or metric"
        self._log_now = torch.compiler.disable(self.after_what_came_before(log), reason=why)
        self._log_dict_now = torch.compiler.disable(self.after_what_came_before(log_dict), reason=why)
        self._updates: dict[int, Callable[..., None]] = {}

    def after_what_came_before(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """``method`` called in order, on metrics that work as ever."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.flush()
            with self._not_collecting():
                return method(*args, **kwargs)

        return call

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Collect."""
        if _can_wait(value):
            self._calls.append(("log", name, _snapshot(value), args, kwargs))
        else:
            self._log_now(name, value, *args, **kwargs)

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        """Collect."""
        if isinstance(dictionary, (dict, MetricCollection)) and _can_wait(dictionary):
            self._calls.append(("log_dict", None, _snapshot(dictionary), args, kwargs))
        else:
            self._log_dict_now(dictionary, *args, **kwargs)

    def update_of(self, metric: Metric | MetricCollection) -> Callable[..., None]:
        """What stands in for the method ``update`` of ``metric``."""
        key = id(metric)
        method = self._updates[key] = metric.update
        now = torch.compiler.disable(self.after_what_came_before(method), reason="metrics are plain Python")

        def update(*args: Any, **kwargs: Any) -> None:
            if self._collecting and _can_wait(args) and _can_wait(kwargs):
                self._calls.append(("update", key, None, _snapshot(args), _snapshot(kwargs)))
            else:
                now(*args, **kwargs)

        return update

    def flush(self) -> None:
        """Hand everything to Lightning and the metrics, in order."""
        if not self._calls:
            return
        calls, self._calls = self._calls, []
        with self._not_collecting():
            for kind, key, value, args, kwargs in calls:
                if kind == "log":
                    self._log(key, value, *args, **kwargs)
                elif kind == "log_dict":
                    self._log_dict(value, *args, **kwargs)
                else:
                    self._updates[key](*args, **kwargs)

    def discard(self) -> None:
        """Forget what was collected, after a step that failed."""
        self._calls = []

    @contextlib.contextmanager
    def _not_collecting(self) -> Iterator[None]:
        """A metric that is at work calls its own methods, or those of the metrics it consists of."""
        before, self._collecting = self._collecting, False
        try:
            yield
        finally:
            self._collecting = before
