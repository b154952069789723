"""Methods of a module, compiled: what the steps of a Trainer and the modules of a Fabric have in common."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.distributions import checked_distributions
from lightning_ort.compiler.dynamo import DynamoObserver, Preparation, compiled_apart, global_hooks
from lightning_ort.compiler.executors.executable import Account
from lightning_ort.compiler.handlers import LeftToPython
from lightning_ort.compiler.interrupts import Interrupts
from lightning_ort.compiler.plan import Fallback
from lightning_ort.compiler.transformer_modules import transformers_in_graphs
from lightning_ort.lightning.growing_lists import GrowingLists
from lightning_ort.lightning.open_sizes import OpenSizes
from lightning_ort.lightning_packages import pl, rank_zero_info
from lightning_ort.report import InTorch, Report, StepReport, timeline
from lightning_ort.runtime import heap

__all__ = ["CompiledMethods"]

_BEGINNING = 3
"""calls of a step in which much is compiled: for the first batch, and for the first ones that are other"""
_FIRST, _WATCH = 4, 64
"""calls of a step after each of which the memory that is left is looked at, and every how many later on"""
_DRAWS_WEIGHTS = "it draws the weights of lazy layers, each where eager does; in a graph all are drawn before it runs"
NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def _codes(module: torch.nn.Module) -> dict[FunctionType, CodeType]:
    """The functions in the classes of ``module``, of what is in it and of its attributes, and their code."""
    parts = {type(x) for m in module.modules() for x in (m, *vars(m).values())}
    members = [x for kind in {c for part in parts for c in part.__mro__} for x in vars(kind).values()]
    found = [x.fget if isinstance(x, property) else getattr(x, "__func__", x) for x in members]
    return {function: function.__code__ for function in found if isinstance(function, FunctionType)}


def _is_lazy(module: torch.nn.Module) -> bool:
    """Whether ``module`` has layers whose weights are made when they are called for the first time."""
    return any(is_lazy(x) for x in (*module.parameters(), *module.buffers()))


def _weak(method: Callable[[Any], None]) -> Callable[[Any], None]:
    reference = weakref.WeakMethod(method)

    def call(argument: Any) -> None:
        method = reference()
        if method is not None:
            method(argument)

    return call


def _nothing_has_run() -> bool:
    """Whether Dynamo compiles a method as a whole, which :class:`CompiledMethods` calls: no part of it has run."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not CompiledMethods.__call__.__code__:
        file = frame.f_code.co_filename
        if not file.startswith(_COMPILERS) and (not file.startswith(_STANDARD) or "site-packages" in file):
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


_COMPILERS = tuple(os.path.join(folder, "") for folder in (os.path.dirname(torch.__file__), Path(__file__).parents[1]))
_STANDARD = sysconfig.get_path("stdlib")


class CompiledMethods:
    """Calls methods of ``module`` through ``torch.compile`` and keeps the report.

    Args:
        module: whose methods are called.
        backend: where their graphs go.
        report: what is known so far; gets everything that happens from now on.
        prefix: of what the methods are called there.
    """

    def __init__(self, module: torch.nn.Module, backend: ORTBackend, report: Report, prefix: str = "") -> None:
        self.module, self.report, self._prefix = module, report, prefix
        self._running: StepReport | None = None
        self._settings = contextlib.ExitStack()
        self._dynamo = Preparation()
        self._interrupts = Interrupts(rank_zero_info)
        self._observer = DynamoObserver(lambda: self._running, rank_zero_info, self._begin_compiling)
        # weakly: what Dynamo keeps with the code of a method has the backend, and no collector sees that way
        backend.on_graph, backend.on_fallback = _weak(self._on_graph), _weak(self._on_fallback)
        self._backend = backend
        # what of it was compiled, of what code, and as what: users may put another method, or other code, in its place
        self._compiled: dict[Hashable, tuple[Callable[..., Any], CodeType | None, Callable[..., Any]]] = {}
        self._codes: dict[FunctionType, CodeType] = {}
        self._lists = GrowingLists(module)
        self._open_sizes = OpenSizes(module)
        self._begun: Counter[tuple[Hashable, bool]] = Counter()
        # names of the method that is running, and of the one that was read in this call
        self._called: str | None = None
        self._just_read: str | None = None
        backend.may_leave = _nothing_has_run
        self._trainer: pl.Trainer | None = None
        self._device = "cpu"

    def install(self) -> None:
        """Prepare Dynamo; :meth:`remove` takes it back, and must be called in between."""
        self.remove()
        self._settings.enter_context(self._prepared())
        self._settings.enter_context(transformers_in_graphs())
        self._settings.enter_context(checked_distributions())
        self._observer.install()

    def note_edits(self) -> None:
        """Forget what was compiled if a function of the module's classes has got other code since this was last asked.

        Notebooks with ``%autoreload 2`` write what was edited into the functions that there are. Dynamo watches which
        function is called, and not its code.
        """
        codes = _codes(self.module)
        if any(codes.get(function, code) is not code for function, code in self._codes.items()):
            self._compiled.clear()
        self._codes = codes

    def has_run(self, name: str) -> bool:
        """Whether the method ``name`` was called outside of inference mode, for which it is compiled by itself."""
        return bool(self._begun[name, False])

    def remove(self) -> None:
        """Leave Dynamo as it was."""
        self._observer.remove()
        self._settings.close()
        timeline.close()

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the module's method ``name``."""
        mode, method, sizes = self._mode(name), getattr(self.module, name), NOTHING
        key = mode[0], global_hooks()
        code = getattr(method, "__code__", None)
        original, original_code, compiled = self._compiled.get(key, (None, None, None))
        draws_weights = not self._begun[mode] and _is_lazy(self.module)
        if self._begun[mode] < _BEGINNING:
            sizes = self._open_sizes.expecting(name, (args, kwargs), self._trainer)
            self._begun[mode] += 1
        if compiled is None or original != method or original_code is not code:
            function = self._method(name)
            self._lists.expect(name, function)
            self._just_read = name
            compiled = compiled_apart(function, self._backend)
            self._compiled[key] = method, code, compiled
        if draws_weights:
            compiled = torch.compiler.disable(self._method(name), reason=_DRAWS_WEIGHTS)
        outer, self._running = self._running, self.report.step(f"{self._prefix}{name}")
        caller, self._called = self._called, name
        self._count(self._running)
        if draws_weights:
            self._on_fallback([Fallback("the first call", _DRAWS_WEIGHTS, "")])
        if outer is None and (timeline.present is not None or self._running.calls >= self._running.timing.due):
            self._begin_timing(self._running)
        compilations, failures = self._observer.compilations, self._observer.failures
        self._before(name)
        self._lists.place(name)
        try:
            with self._around(), sizes:
                try:
                    result, left = compiled(*args, **kwargs), False
                except LeftToPython:  # nothing of it has run
                    left = True
                if left:
                    self._interrupts.release()
                    as_it_is = torch.compiler.disable(self._method(name), reason="it handles errors")
                    self._compiled[key] = method, code, as_it_is
                    result = as_it_is(*args, **kwargs)
            self._interrupts.release()
        except BaseException:
            self._interrupts.forget()
            self._discard()
            if self._observer.failures != failures:
                # Dynamo leaves the function to Python for good, but the next data may be right
                del self._compiled[key]
            raise
        finally:
            self._lists.remove()
            self._just_read = None
            if self._observer.compilations != compilations:
                self._observer.collect()
                self._open_sizes.note(name, (args, kwargs))
            self._running, self._called = outer, caller
        self._after()
        if timeline.present is not None:
            timeline.present.leave(name)
        return result

    def _begin_compiling(self) -> None:
        """Dynamo begins to compile a function of the step that is running."""
        self._interrupts.hold()
        if self._called is not None and self._called != self._just_read:
            self._lists.reconsider(self._called, self._method(self._called))
        self._just_read = None  # what is compiled next in this call may have been changed by it

    def _count(self, step: StepReport) -> None:
        step.calls += 1
        if step.calls <= _FIRST or step.calls % _WATCH == 0:
            heap.watch()

    # -- what subclasses have to say ------------------------------------------------------------------------------

    def _prepared(self) -> contextlib.AbstractContextManager[None]:
        """Dynamo, between :meth:`install` and :meth:`remove`."""
        return self._dynamo.throughout()

    def _method(self, name: str) -> Callable[..., Any]:
        """The method that is compiled."""
        method: Callable[..., Any] = getattr(self.module, name)
        return method

    def _mode(self, name: str) -> tuple[Hashable, bool]:
        """What is compiled by itself, and whether in inference mode: data made in that are compiled for anew."""
        return name, torch.is_inference_mode_enabled()

    def _begin_timing(self, step: StepReport) -> None:
        """A call begins that may be timed."""
        timeline.begin(step, self._device)

    def _before(self, name: str) -> None:
        """A call begins."""

    def _around(self) -> contextlib.AbstractContextManager[None]:
        """What is in force while the method runs."""
        return NOTHING

    def _discard(self) -> None:
        """A call has raised."""

    def _after(self) -> None:
        """A call has returned."""

    # -- the report -----------------------------------------------------------------------------------------------

    def _on_graph(self, executable: Account) -> None:
        if self._running is not None:
            if executable.report is not None:
                self._running.each_graph.append(executable.report)
            self._running.graphs += 1
            self._running.graphs_in_torch += not executable.in_onnxruntime
            if executable.milliseconds:
                self._running.measured.append(executable.milliseconds)
            self._running.compile_seconds += executable.choosing_seconds
            self._running.widened += executable.widened
            self._running.preferred.update(executable.preferred)
            self._running.on_cpu.update(executable.on_cpu)

    def _on_fallback(self, fallbacks: Sequence[Fallback]) -> None:
        if self._running is None:
            return
        for f in fallbacks:
            entry = InTorch(f.operator, f.reason, f.source)
            if entry not in self._running.in_torch:
                self._running.in_torch.append(entry)
                rank_zero_info(f"{self._running.name}: {f.operator} runs in torch: {f.reason} ({f.source})")
