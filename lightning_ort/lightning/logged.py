"""What a step logs and gives to metrics, collected while it runs, so that the step is one graph.

``self.log`` and ``metric.update`` are Python that Dynamo cannot put into a graph. What stands in for them only
collects, which it can follow; what was collected reaches Lightning and the metrics when the step has ended.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch._dynamo.comptime import ComptimeContext, comptime

# Private: there is no public way to have a function followed, but not compiled by itself.
from torch._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import BootStrapper

from lightning_ort.compiler.user_errors import Frames, behind, frames_in
from lightning_ort.lightning_packages import package_of

__all__ = ["LogRecorder", "logged_so_far", "results_stay"]


def _snapshot(value: Any) -> Any:
    """What a logged value is now: the step may go on to change the tensor in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _snapshot(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)([_snapshot(v) for v in value])
    return value


def _as_number(value: Any) -> Any:
    """Numbers of NumPy that Dynamo has computed with are arrays since."""
    if type(value) is dict:
        return {k: _as_number(v) for k, v in value.items()}
    return value[()] if isinstance(value, np.ndarray) and not value.ndim else value


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


_RECORDERS: weakref.WeakValueDictionary[str, LogRecorder] = weakref.WeakValueDictionary()


def _note_place(context: ComptimeContext) -> None:
    """Enter, while Dynamo compiles a call of a method of :class:`LogRecorder`, where that call is."""
    place = context.get_local("place").as_python_constant()
    text = io.StringIO()
    with contextlib.suppress(AttributeError):  # if it compiles the method by itself, it does not know by whom
        context.print_bt(file=text, stacklevel=1)
        _RECORDERS[place.partition(" ")[0]].lines[place] = frames_in(text.getvalue())


def _note_place_uncompiled() -> None:
    """The same, where Python executes the call."""
    method = sys._getframe(2)
    place, user = method.f_locals["place"], method.f_back
    if user is not None:
        code = user.f_code
        _RECORDERS[place.partition(" ")[0]].lines[place] = [(code.co_filename, user.f_lineno, code.co_name)]


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _never_compiled_alone(function: _Function) -> _Function:
    """``function``, which Dynamo follows in what it compiles, and leaves alone where Python calls it.

    It would compile it anew for each name that is logged.
    """
    set_code_exec_strategy(function.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
    return function


_DEVICES = ("cpu", "cuda")


def _autocast() -> list[tuple[bool, torch.dtype]]:
    """The state of autocast, which a metric computes under."""
    return [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES]


@contextlib.contextmanager
def _as_it_was(autocast: list[tuple[bool, torch.dtype]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device, then, now in zip(_DEVICES, autocast, _autocast(), strict=True):
            if then != now and (then[0] or now[0]):
                stack.enter_context(torch.autocast(device, enabled=then[0], dtype=then[1]))
        yield


class LogRecorder:
    """Collects what a step logs and what it gives to metrics, and does both in order when the step has ended.

    What a metric answers cannot wait: ``forward`` and ``compute`` break the graph, after everything before them was
    done. Nor can what Lightning is known to refuse. Other errors of what was collected have the user's line in their
    traceback, as if they had been raised there.

    Args:
        log: the module's own method.
        log_dict: the module's own method.
        metrics: those that the module has, the only ones that Lightning takes.
        needs_batch_size: Lightning refuses to log without a ``batch_size``.

    Attributes:
        allowed: Lightning takes what the step logs.
        lines: the last calls of each name, as far as they are known.
    """

    def __init__(
        self,
        log: Callable[..., None],
        log_dict: Callable[..., None],
        metrics: Iterable[Metric] = (),
        *,
        needs_batch_size: bool = False,
    ) -> None:
        # entries are built from names, tensors and modules alone, which Dynamo can follow
        self._calls: list[tuple[str, Any, Any, Any, Any, str]] = []
        self._log, self._log_dict, self._needs_batch_size = log, log_dict, needs_batch_size
        self._metrics = tuple(metrics)
        self._collecting = self.allowed = True
        self._token = f"{id(self)}"  # what Dynamo calls while it compiles can have nothing bound to it
        self.lines: dict[str, Frames] = {}
        _RECORDERS[self._token] = self
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
                return method(*map(_as_number, args), **kwargs)

        return call

    @_never_compiled_alone
    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Collect; at once what Lightning's ``log_dict`` logs while what came before is handed on."""
        if self._collecting and self._can_be_logged(name, value, kwargs) and self._are_right(args, kwargs):
            place = f"{self._token} log {name}"
            comptime(_note_place, _note_place_uncompiled)
            self._calls.append(("log", name, _snapshot(value), args, kwargs, place))
        else:
            self._log_now(name, value, *args, **kwargs)

    @_never_compiled_alone
    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        """Collect."""
        valid = (self.allowed and isinstance(dictionary, MetricCollection)) or (
            isinstance(dictionary, dict) and all(self._can_be_logged(k, v, kwargs) for k, v in dictionary.items())
        )
        if valid and self._are_right(args, kwargs):
            names = ", ".join(dictionary) if isinstance(dictionary, dict) else ""
            place = f"{self._token} log_dict {names}"
            comptime(_note_place, _note_place_uncompiled)
            self._calls.append(("log_dict", None, _snapshot(dictionary), args, kwargs, place))
        else:
            self._log_dict_now(dictionary, *args, **kwargs)

    def _can_be_logged(self, name: Any, value: Any, kwargs: dict[str, Any]) -> bool:
        """Whether Lightning will take ``value``; what it refuses, it shall refuse in the line that logs it."""
        if not self.allowed or not isinstance(name, str) or "/dataloader_idx_" in name:
            return False
        if isinstance(value, torch.Tensor):
            return value.numel() == 1
        if isinstance(value, Metric) and kwargs.get("metric_attribute") is None:
            return any(value is metric for metric in self._metrics)
        return isinstance(value, (int, float, Metric))

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

        if any(isinstance(part, BootStrapper) for part in metric.modules()):
            return now  # it draws random numbers, which are the step's own to order

        @_never_compiled_alone
        def update(*args: Any, **kwargs: Any) -> None:
            if self._collecting and _can_wait(args) and _can_wait(kwargs):
                place = f"{self._token} update {key}"
                comptime(_note_place, _note_place_uncompiled)
                self._calls.append(("update", key, _autocast(), _snapshot(args), _snapshot(kwargs), place))
            else:
                now(*args, **kwargs)

        return update

    def flush(self) -> None:
        """Hand everything to Lightning and the metrics, in order."""
        if not self._calls:
            return
        calls, self._calls = self._calls, []
        with self._not_collecting():
            for *call, place in calls:
                try:
                    self._make(*call)
                except Exception as error:
                    inner = error.__traceback__.tb_next if error.__traceback__ else None
                    raise error.with_traceback(behind(self.lines.get(place, ()), inner))  # noqa: B904

    def _make(self, kind: str, key: Any, value: Any, args: Any, kwargs: Any) -> None:
        if kind == "log":
            self._log(key, value, *args, **kwargs)
        elif kind == "log_dict":
            self._log_dict(value, *args, **kwargs)
        else:
            with _as_it_was(value):
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


def logged_so_far(connector: Any, recorder: LogRecorder) -> Any:
    """What stands in for ``connector`` in a step: the same, but ``trainer.callback_metrics`` and its like know what the
    step has logged.
    """

    def read(name: str) -> Any:
        getter = recorder.after_what_came_before(getattr(type(connector), name).fget)
        return property(torch.compiler.disable(getter, reason="the Trainer's metrics are plain Python"))

    names = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
    same: Any = object.__new__(type("_LoggedSoFar", (type(connector),), {name: read(name) for name in names}))
    same.__dict__ = connector.__dict__
    return same


@contextlib.contextmanager
def results_stay(module: Any) -> Iterator[None]:
    """Meanwhile ``self.log`` of ``module`` moves no result to the device that it is on.

    Lightning moves a result to the device of each new value, and copies all that belongs to the result in doing so,
    its description included. In a small step that takes longer than the forward and the backward pass.
    """
    result = package_of(module).get("trainer.connectors.logger_connector.result:_ResultMetric")
    move = result.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and self.is_tensor and _is_on(self, args[0]):
            return self
        return move(self, *args, **kwargs)

    result.to = to
    try:
        yield
    finally:
        result.to = move


def _is_on(result: Any, device: Any) -> bool:
    """Whether the states of ``result``, and what they are reset to, are on ``device``."""
    return all(
        getattr(result, name).device == device == default.device
        for name, default in result._defaults.items()
        if isinstance(default, torch.Tensor)
    )
