"""What TorchDynamo needs to compile whole steps."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import logging
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, cast

import torch
import torch._dynamo.config
from torch import fx
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.callback import callback_handler
from torch.nn.modules import module as module_hooks

from lightning_ort.compiler import plain_values
from lightning_ort.compiler.cheap_tracing import collecting_rarely_in_frames
from lightning_ort.compiler.decompositions.registry import results_told
from lightning_ort.compiler.dynamo_words import compiled_again, function_name, graph_break, why
from lightning_ort.compiler.symbolic_shapes import open_dims
from lightning_ort.environment import LIBRARIES
from lightning_ort.report import InTorch, StepReport, timeline
from lightning_ort.report.announcement import Announcement

__all__ = [
    "DynamoObserver",
    "OpenResults",
    "Preparation",
    "compiled_apart",
    "global_hooks",
    "marked_open",
    "no_accounts",
]

DYNAMO_SETTINGS = {
    # a counter attribute would otherwise be compiled for each of its values
    "allow_unspec_int_on_nn_module": True,
    # by default Dynamo leaves recurrent networks to torch, because it unrolls them
    "allow_rnn": True,
    # a function that Dynamo fails at is left to Python, which raises the user's own error at the user's own line
    "suppress_errors": True,
    # by default hooks that a module gets or loses after it was compiled go unnoticed
    "skip_nnmodule_hook_guards": False,
    # Dynamo would cut graphs where a bucket of DistributedDataParallel is full
    "optimize_ddp": False,
    # of one function for all that is compiled apart; each has a limit of its own
    "accumulated_recompile_limit": 10_000,
    # each call of compiled code would make two more, to enter and leave a span of torch's profiler
    **({"record_runtime_overhead": False} if hasattr(torch._dynamo.config, "record_runtime_overhead") else {}),
    # what changes objects would be described for a log, with the whole stack each time
    **({"side_effect_replay_policy": "silent"} if hasattr(torch._dynamo.config, "side_effect_replay_policy") else {}),
    **plain_values.SETTINGS,
}
"""Settings of ``torch._dynamo.config`` while steps run."""
_EARLY = {name: DYNAMO_SETTINGS[name] for name in ("accumulated_recompile_limit", "trace_numpy")}
"""those that Dynamo reads when it decides whether to compile"""


class Preparation:
    """Dynamo as steps need it: its settings, and the values left to Python that it has no faithful stand-in for."""

    def __init__(self) -> None:
        behind_graphs = "reorderable_logging_functions"  # the user may have said of others that they may be
        users = getattr(torch._dynamo.config, behind_graphs)
        # making them takes longer than entering them
        self._settings = torch._dynamo.config.patch(
            {**DYNAMO_SETTINGS, behind_graphs: users | DYNAMO_SETTINGS[behind_graphs]}
        )
        self._early = torch._dynamo.config.patch(_EARLY)

    @contextlib.contextmanager
    def throughout(self) -> Iterator[None]:
        """From the beginning to the end, ``torch.compiler.reset`` or not."""
        with self._settings, plain_values.left_to_python(), results_told(), collecting_rarely_in_frames():
            yield

    @contextlib.contextmanager
    def when_compiling(self) -> Iterator[None]:
        """From the moment on, in a single step, at which Dynamo begins to compile something.

        Settings take time, and changing classes of Dynamo empties the caches in which Python keeps where their
        attributes are: a tenth of a millisecond in all, which a step that compiles nothing need not take.
        """
        with contextlib.ExitStack() as entered:
            entered.enter_context(self._early)
            waiting = [self.throughout]

            def begin(_: Any) -> None:
                if waiting:
                    entered.enter_context(waiting.pop()())

            callback_handler.register_start_callback(begin)
            try:
                yield
            finally:
                if begin in callback_handler.start_callbacks:
                    callback_handler.start_callbacks.remove(begin)


_OPEN = "_dynamo_propagated_dynamic_indices"
"""Where Dynamo looks for sizes of a tensor that may change.

Private: what ``torch._dynamo.maybe_mark_dynamic`` writes is guarded, so that a function compiled for a tensor without
it, in another step say, is compiled once more. A torch that does not know this name compiles for sizes as they are,
and again when they change.
"""


_marked: contextvars.ContextVar[list[torch.Tensor] | None] = contextvars.ContextVar("marked", default=None)
"""while sizes are marked: the tensors with marks"""


@contextlib.contextmanager
def marked_open(sizes: Sequence[tuple[torch.Tensor, int]]) -> Iterator[None]:
    """What is compiled meanwhile has these sizes open, and those that follow from them behind graph breaks, if it can.

    Args:
        sizes: tensors and numbers of dimensions; all marks are gone in the end.
    """
    marked: list[torch.Tensor] = []
    token = _marked.set(marked)
    for x, dim in sizes:
        _mark(x, {dim})
    try:
        yield
    finally:
        for x in marked:
            x.__dict__.pop(_OPEN, None)
        _marked.reset(token)


def _mark(tensor: torch.Tensor, dims: set[int]) -> None:
    marked = _marked.get()
    if marked is not None:
        tensor.__dict__[_OPEN] = tensor.__dict__.get(_OPEN, set()) | dims
        marked.append(tensor)


class OpenResults:
    """Marks the sizes of results that are open in a graph, for the graph that follows.

    Args:
        graph: Dynamo's.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        results = enumerate(graph.graph.output_node().args[0] if _marked.get() is not None else ())
        values = [(i, r.meta.get("example_value")) for i, r in results if isinstance(r, fx.Node)]
        self._dims = [(i, dims) for i, x in values if isinstance(x, torch.Tensor) and (dims := open_dims(x))]

    def mark(self, results: Sequence[Any]) -> None:
        """Mark ``results``, if this is the time for it."""
        for i, dims in self._dims:
            if isinstance(results[i], torch.Tensor):
                _mark(results[i], dims)


def global_hooks() -> tuple[Callable[..., Any], ...]:
    """Hooks of all modules, which Dynamo compiles as they are, and does not guard.

    Private: torch says in public how they are registered, and not which there are.
    """
    if not module_hooks._has_any_global_hook():
        return ()
    tables = (
        module_hooks._global_forward_pre_hooks,
        module_hooks._global_forward_hooks,
        module_hooks._global_backward_pre_hooks,
        module_hooks._global_backward_hooks,
    )
    return tuple(hook for table in tables for hook in table.values())


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function or bound method with a code object of its own.

    Dynamo keeps what it compiled with the code object: functions that share it, of other modules or for other
    strategies, would add to one list, whose length is limited.
    """
    original = getattr(function, "__func__", function)
    if not isinstance(original, types.FunctionType):
        return function
    code = original.__code__.replace()
    copy = types.FunctionType(
        code, original.__globals__, original.__name__, original.__defaults__, original.__closure__
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    copy.__dict__.update(original.__dict__)
    owner = getattr(function, "__self__", None)
    return copy if owner is None else types.MethodType(copy, owner)


_APART: dict[str, Any] = (
    {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
)


def compiled_apart(function: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` through ``torch.compile``, apart from all else that is compiled of the same code.

    What Dynamo has compiled of a function for another backend, another Trainer's say, counts against the limit on how
    often it is compiled. The code of ``function`` is copied; functions that it calls, which Dynamo compiles by
    themselves where a graph breaks, are kept apart by torch, from 2.13 on.
    """
    return torch.compile(
        _with_own_code(function), backend=backend, **_APART
    )  # dynamic=None: sizes that change are open


# Dynamo tells these things to its own log files only; this module is the one place that reads its records.


class DynamoObserver(logging.Handler):
    """Enters what Dynamo does into the report of the step that is running.

    Args:
        current: gives the report of the running step, or ``None`` while none is.
        announce: called with a text when a compilation has been going on for a second, and when it is over.
        on_start: called when a step begins to be compiled.

    Attributes:
        compilations: how often Dynamo has begun to compile.
        failures: how often it has found that it cannot.
    """

    _LOGGER = "torch._dynamo.convert_frame"
    _FAILURES: ClassVar = {
        _LOGGER: "WON'T CONVERT",
        "torch._subclasses.fake_tensor": "failed while attempting to run meta",
    }
    """loggers to how their accounts begin of code that Dynamo cannot compile and leaves to Python, over many lines"""

    _BREAKS: ClassVar = {
        "torch._dynamo.variables.tensor": "Graph break from `Tensor.item()`",
        "torch._dynamo.variables.builtin": "incorrect arg count",
    }
    """likewise of graph breaks, which are in the report with the user's line, and of what it then does otherwise"""

    _UNKNOWN = "Dynamo (does not know how to trace the builtin|detected a call to a `functools.lru_cache`)"
    """warnings about some of them, with a request to report them, and about what torch itself keeps in a cache"""

    def __init__(
        self,
        current: Callable[[], StepReport | None],
        announce: Callable[[str], None],
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(logging.WARNING)
        self._current, self._announce, self._begin = current, announce, on_start
        self._started: float | None = None
        self._announcement: Announcement | None = None
        self._breaks = 0
        self._last_metrics: Any = None
        self._filter: Any = None
        self._is_installed = False
        self._logger = logging.getLogger(self._LOGGER)
        self._silences = [(logging.getLogger(n), _Silence(text, self._count)) for n, text in self._FAILURES.items()]
        self._silences += [(logging.getLogger(n), _Silence(text)) for n, text in self._BREAKS.items()]
        self.compilations = 0
        self.failures = 0

    def install(self) -> None:
        """Start watching."""
        callback_handler.register_start_callback(self._on_start)
        callback_handler.register_end_callback(self._on_end)
        self._is_installed = True
        self._logger.addHandler(self)
        for logger, silence in self._silences:
            logger.addFilter(silence)
        warnings.filterwarnings("ignore", self._UNKNOWN)
        self._filter = warnings.filters[0]
        self._breaks = len(dynamo_utils.graph_break_reasons)
        self._last_metrics = self._newest_metrics()

    def remove(self) -> None:
        """Stop watching."""
        if not self._is_installed:
            return
        self._is_installed = False
        if self._announcement is not None:
            self._announcement.drop()
            self._announcement = None
        for callbacks, mine in (
            (callback_handler.start_callbacks, self._on_start),
            (callback_handler.end_callbacks, self._on_end),
        ):
            if mine in callbacks:
                callbacks.remove(mine)
        self._logger.removeHandler(self)
        for logger, silence in self._silences:
            logger.removeFilter(silence)
        if self._filter in warnings.filters:
            cast("list[Any]", warnings.filters).remove(self._filter)
        self._filter = None

    def _count(self) -> None:
        self.failures += 1

    def collect(self) -> None:
        """Enter what Dynamo recorded since the last call; to be called when a step has ended."""
        report = self._current()
        if report is None:
            return
        reasons = dynamo_utils.graph_break_reasons
        if len(reasons) < self._breaks:  # cleared by torch.compiler.reset
            self._breaks = 0
        for reason in reasons[self._breaks :]:
            entry = graph_break(str(reason.reason), _users_line(reason.user_stack))
            if entry.source and entry not in report.graph_breaks:
                report.graph_breaks.append(entry)
        self._breaks = len(reasons)
        for metrics in self._metrics_since():
            self._enter_failure(report, metrics)
            # without a name it was one too many, which a warning has told, see emit
            if metrics.recompile_reason and metrics.co_name:
                changed = compiled_again(metrics.recompile_reason)
                report.recompilations.append(f"{function_name(metrics.co_name)}: {changed}")

    @staticmethod
    def _enter_failure(report: StepReport, metrics: Any) -> None:
        """A function that Dynamo leaves to Python as a whole; what it calls may still be compiled."""
        where = str(metrics.co_filename or "")
        if not metrics.fail_reason or not where or where.startswith(LIBRARIES):
            return
        name = function_name(metrics.co_name)
        entry = InTorch(
            what=f"{name} as a whole" if name == metrics.co_name else f"{name}, as a whole",
            reason="Dynamo cannot compile a part of it, as where the graph breaks inside of a loop or a with block: "
            f"{why(metrics.fail_reason)}",
            source=f"{where}:{metrics.co_firstlineno}",
        )
        if entry not in report.in_torch:
            report.in_torch.append(entry)

    def emit(self, record: logging.LogRecord) -> None:
        """Dynamo gives up a function after too many recompilations, and says so in a warning."""
        message = record.getMessage()
        report = self._current()
        if report is None or "torch._dynamo hit config." not in message:
            return
        lines = [line.strip() for line in message.splitlines()]
        function = next((x.removeprefix("function: ") for x in lines if x.startswith("function: ")), "")
        entry = InTorch(
            what=function_name(function.partition("'")[2].partition("'")[0] or "a function"),
            reason="it was compiled too often, and is left to Python from now on. Last of all: "
            + compiled_again(next((x.removeprefix("last reason: ") for x in lines if x.startswith("last reason")), "")),
            source=function.partition("(")[2].rstrip(")"),
        )
        if entry not in report.in_torch:
            report.in_torch.append(entry)

    def _on_start(self, args: Any) -> None:
        self.compilations += 1
        timeline.spoil()
        report = self._current()
        self._started = time.perf_counter()
        if report is not None:
            self._begin()
            self._announcement = Announcement(
                self._announce,
                f"Compiling {report.name} for ONNX Runtime ...",
                f"Compiled {report.name} in {{seconds}}.",
                after=1.0,
            )

    def _on_end(self, args: Any) -> None:
        if self._started is None:
            return
        seconds, self._started = time.perf_counter() - self._started, None
        report, announcement, self._announcement = self._current(), self._announcement, None
        if announcement is not None:
            announcement.end()
        if report is not None:
            report.compile_seconds += seconds

    @staticmethod
    def _newest_metrics() -> Any:
        records = dynamo_utils._compilation_metrics
        return records[-1] if records else None

    def _metrics_since(self) -> list[Any]:
        fresh: list[Any] = []
        for metrics in reversed(dynamo_utils._compilation_metrics):
            if metrics is self._last_metrics:
                break
            fresh.append(metrics)
        self._last_metrics = self._newest_metrics()
        return fresh[::-1]


@contextlib.contextmanager
def no_accounts() -> Iterator[None]:
    """Keep from the log what Dynamo tells of code that it cannot compile: its error says it shorter."""
    for logger, silence in _SILENCES:
        logger.addFilter(silence)
    try:
        yield
    finally:
        for logger, silence in _SILENCES:
            logger.removeFilter(silence)


class _Silence(logging.Filter):
    """Keeps messages that begin like this from the log: what comes of them is in the report, or is raised."""

    def __init__(self, beginning: str, on_message: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._beginning, self._on_message = beginning, on_message

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.getMessage().startswith(self._beginning):
            return True
        self._on_message()
        return False


_SILENCES = [(logging.getLogger(name), _Silence(beginning)) for name, beginning in DynamoObserver._FAILURES.items()]


def _users_line(stack: Sequence[Any]) -> str:
    """The innermost line that is not in a library; empty when there is none."""
    frame = next((f for f in reversed(stack) if not f.filename.startswith(LIBRARIES)), None)
    return f"{frame.filename}:{frame.lineno}: {frame.line}" if frame else ""
