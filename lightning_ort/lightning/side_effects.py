"""Objects that stand in for parts of a LightningModule while a step runs, so that a step is one graph.

``self.log`` and ``self.outputs.append`` are Python that Dynamo cannot put into a graph, or that makes it compile
again for every length of the list. The stand-ins only collect, which it can follow; what they collected reaches
Lightning and the list when the step has ended.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torchmetrics import Metric, MetricCollection

__all__ = ["GrowingList", "GrowingLists", "LogRecorder", "appended_attributes", "logged_so_far", "results_stay"]


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


_ARGUMENTS = {
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group",
    "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only",
}  # fmt: skip
_REDUCTIONS = ("mean", "sum", "min", "max", "avg")


def _can_be_logged(name: Any, value: Any) -> bool:
    """Whether Lightning will take ``value``; what it refuses, it shall refuse in the line that logs it."""
    if not isinstance(name, str) or "/dataloader_idx_" in name:
        return False
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float, Metric))


class LogRecorder:
    """Collects what a step logs and what it gives to metrics, and does both in order when the step has ended.

    What a metric answers cannot wait: ``forward`` and ``compute`` break the graph, after everything before them was
    done.

    Args:
        log: the module's own method.
        log_dict: the module's own method.
        needs_batch_size: Lightning refuses to log without a ``batch_size``.
    """

    def __init__(
        self, log: Callable[..., None], log_dict: Callable[..., None], *, needs_batch_size: bool = False
    ) -> None:
        # entries are built from names, tensors and modules alone, which Dynamo can follow
        self._calls: list[tuple[str, Any, Any, Any, Any]] = []
        self._log, self._log_dict, self._needs_batch_size = log, log_dict, needs_batch_size
        self._collecting = True
        why = "what is logged is no scalar or metric, or it is logged in an unusual way"
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
        if _can_be_logged(name, value) and self._are_right(args, kwargs):
            self._calls.append(("log", name, _snapshot(value), args, kwargs))
        else:
            self._log_now(name, value, *args, **kwargs)

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        """Collect."""
        valid = isinstance(dictionary, MetricCollection) or (
            isinstance(dictionary, dict) and all(_can_be_logged(k, v) for k, v in dictionary.items())
        )
        if valid and self._are_right(args, kwargs):
            self._calls.append(("log_dict", None, _snapshot(dictionary), args, kwargs))
        else:
            self._log_dict_now(dictionary, *args, **kwargs)

    def _are_right(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether Lightning will take these further arguments, as far as that can be told from them alone."""
        if self._needs_batch_size and kwargs.get("batch_size") is None:
            return False
        reduction = kwargs.get("reduce_fx", "mean")
        if isinstance(reduction, str) and reduction not in _REDUCTIONS:
            return False
        return len(args) <= 4 and all(k in _ARGUMENTS for k in kwargs)  # four switches may have no name

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


# Private, for want of a public way: Lightning makes its results and the object that has them itself.


def logged_so_far(connector: _LoggerConnector, recorder: LogRecorder) -> _LoggerConnector:
    """What stands in for ``connector`` in a step: the same, but ``trainer.callback_metrics`` and its like know what the
    step has logged.
    """

    def read(name: str) -> Any:
        getter = recorder.after_what_came_before(getattr(_LoggerConnector, name).fget)
        return property(torch.compiler.disable(getter, reason="the Trainer's metrics are plain Python"))

    names = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
    same: _LoggerConnector = object.__new__(
        type("_LoggedSoFar", (type(connector),), {name: read(name) for name in names})
    )
    same.__dict__ = connector.__dict__
    return same


@contextlib.contextmanager
def results_stay() -> Iterator[None]:
    """Meanwhile ``self.log`` moves no result to the device that it is on.

    Lightning moves a result to the device of each new value, and copies all that belongs to the result in doing so,
    its description included. In a small step that takes longer than the forward and the backward pass.
    """
    move = _ResultMetric.to

    def to(self: _ResultMetric, *args: Any, **kwargs: Any) -> _ResultMetric:
        if len(args) == 1 and not kwargs and self.is_tensor and _is_on(self, args[0]):
            return self
        return move(self, *args, **kwargs)

    _ResultMetric.to = to  # type: ignore[method-assign]
    try:
        yield
    finally:
        _ResultMetric.to = move  # type: ignore[method-assign]


def _is_on(result: _ResultMetric, device: Any) -> bool:
    """Whether the states of ``result``, and what they are reset to, are on ``device``."""
    return all(
        getattr(result, name).device == device == default.device
        for name, default in result._defaults.items()
        if isinstance(default, torch.Tensor)
    )


def appended_attributes(cls: type, method: Callable[..., Any]) -> set[str]:
    """Names of the attributes to which ``method``, or a method of ``cls`` that it mentions, appends."""
    found: set[str] = set()
    seen: set[Any] = set()
    pending = [getattr(method, "__code__", None)]
    while pending:
        code = pending.pop()
        if code is None or code in seen:
            continue
        seen.add(code)
        instructions = list(dis.get_instructions(code))
        for first, second in itertools.pairwise(instructions):
            appends = second.opname in ("LOAD_METHOD", "LOAD_ATTR") and second.argval in ("append", "extend")
            if appends and first.opname == "LOAD_ATTR":
                found.add(str(first.argval))
        for name in code.co_names:
            pending.append(getattr(getattr(cls, name, None), "__code__", None))
    return found


class GrowingLists:
    """Finds the lists in a namespace (and in dictionaries in it) that grow, and places stand-ins for them.

    Args:
        attributes: the module's instance namespace.
    """

    def __init__(self, attributes: dict[str, Any]) -> None:
        self._attributes = attributes
        self._expected: set[str] = set()
        self._growing: dict[tuple[str | None, Any], GrowingList] = {}
        self._placed: list[tuple[dict[Any, Any], Any, GrowingList]] = []
        self._lengths: list[tuple[tuple[str | None, Any], list[Any], int]] = []

    def expect(self, names: Iterable[str]) -> None:
        """Stand in for the lists of these names without having seen them grow."""
        self._expected.update(names)

    def place(self) -> None:
        """Put the stand-ins in place; to be called before a step."""
        self._lengths = []
        for owner, namespace in self._namespaces():
            for key, value in list(namespace.items()):
                if type(value) is not list:
                    continue
                where = (owner, key)
                standin = self._growing.get(where)
                if standin is None and owner is None and key in self._expected:
                    standin = self._growing[where] = GrowingList(value)
                if standin is None:
                    self._lengths.append((where, value, len(value)))
                    continue
                # a new list may have been bound to the name; for Dynamo the stand-in must stay the same object
                standin.real = value
                namespace[key] = standin
                self._placed.append((namespace, key, standin))

    def remove(self) -> None:
        """Put the real lists back, complete, and learn which others grow; to be called after a step."""
        for namespace, key, standin in self._placed:
            standin.flush()
            if namespace.get(key) is standin:
                namespace[key] = standin.real
        self._placed = []
        known = set()
        for where, value, length in self._lengths:
            known.add(where)
            if len(value) > length:
                self._growing.setdefault(where, GrowingList(value))
        for owner, namespace in self._namespaces():
            if owner is None:
                continue
            for key, value in namespace.items():  # a dictionary of lists is often filled by its first step
                where = (owner, key)
                if type(value) is list and value and where not in known:
                    self._growing.setdefault(where, GrowingList(value))

    def _namespaces(self) -> Iterator[tuple[str | None, dict[Any, Any]]]:
        yield None, self._attributes
        for name, value in self._attributes.items():
            # names with an underscore belong to torch and Lightning
            if isinstance(value, dict) and not name.startswith("_"):
                yield name, value


class GrowingList(MutableSequence[Any]):
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
    def __iadd__(self, values: Iterable[Any]) -> GrowingList:
        self.whole().extend(values)
        return self

    @torch.compiler.disable
    def __eq__(self, other: object) -> bool:
        return self.whole() == (other.whole() if isinstance(other, GrowingList) else other)

    __hash__ = None  # type: ignore[assignment]
