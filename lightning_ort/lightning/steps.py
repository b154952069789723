"""The step functions of a LightningModule, compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo.config
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.dynamo import DYNAMO_SETTINGS, no_fast_path, with_own_code
from lightning_ort.compiler.executable import Executable
from lightning_ort.compiler.observer import DynamoObserver
from lightning_ort.compiler.plan import Fallback
from lightning_ort.report import InTorch, Report, StepReport
from lightning_ort.standins import GrowingLists, LogRecorder, appended_attributes, results_stay

__all__ = ["CompiledSteps"]

# Lightning's own machinery: plain Python that has no place in a graph.
_OUTSIDE = (
    "all_gather", "clip_gradients", "configure_gradient_clipping", "lr_scheduler_step", "lr_schedulers",
    "manual_backward", "optimizers", "print", "toggle_optimizer", "untoggle_optimizer", "toggled_optimizer",
)  # fmt: skip
_METRIC_METHODS = ("forward", "compute", "reset")


class CompiledSteps:
    """Calls step functions of ``module`` through ``torch.compile`` and keeps the report.

    Args:
        module: whose steps are called.
        backend: where their graphs go.
        report: what is known so far; gets everything that happens from now on.
    """

    def __init__(self, module: LightningModule, backend: ORTBackend, report: Report) -> None:
        self.module, self.report = module, report
        self._running: StepReport | None = None
        self._settings = contextlib.ExitStack()
        self._observer = DynamoObserver(lambda: self._running, rank_zero_info)
        self._recorder = LogRecorder(module.log, module.log_dict)
        self._replaced: dict[str, Any] = {
            name: torch.compiler.disable(getattr(module, name), reason=f"{name} is plain Python") for name in _OUTSIDE
        }
        self._replaced |= {"log": self._recorder.log, "log_dict": self._recorder.log_dict}
        backend.on_graph, backend.on_fallback = self._on_graph, self._on_fallback
        self._backend = backend
        self._replaced_in = [(module.__dict__, self._replaced), *_metric_methods(module, self._recorder)]
        self._optimizers: list[Optimizer] = []
        self._optimizer_steps: dict[int, tuple[Any, Namespace]] = {}
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._lists = GrowingLists(module.__dict__)

    def install(self) -> None:
        """Prepare Dynamo; :meth:`remove` takes it back, and must be called in between."""
        self.remove()
        self._settings.enter_context(torch._dynamo.config.patch(DYNAMO_SETTINGS))
        self._settings.enter_context(no_fast_path())
        self._settings.enter_context(results_stay())
        self._observer.install()

    def remove(self) -> None:
        """Leave Dynamo as it was."""
        self._observer.remove()
        self._settings.close()

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the module's step function ``name``."""
        compiled = self._compiled.get(name)
        if compiled is None:
            method = getattr(self.module, name)
            self._lists.expect(appended_attributes(type(self.module), method))
            # dynamic=None: sizes become symbolic once they have changed
            compiled = self._compiled[name] = torch.compile(with_own_code(method), backend=self._backend)
        outer, self._running = self._running, self.report.step(name)
        self._running.calls += 1
        compilations = self._observer.compilations
        self._lists.place()
        replaced_in = [*self._replaced_in, *map(self._outside, self._optimizers)]
        hidden = [_replace(*replacement) for replacement in replaced_in]
        try:
            result = compiled(*args, **kwargs)
        except BaseException:
            self._recorder.discard()
            raise
        finally:
            for (namespace, replaced), originals in zip(replaced_in, hidden, strict=True):
                _put_back(namespace, replaced, originals)
            self._lists.remove()
            if self._observer.compilations != compilations:
                self._observer.collect()
            self._running = outer
        self._recorder.flush()
        return result

    def set_optimizers(self, optimizers: Sequence[Any]) -> None:
        """The optimizers in use, whose updates have no place in a graph, whoever asks for them."""
        self._optimizers = [o for o in optimizers if isinstance(o, Optimizer)]
        self._optimizer_steps = {}

    def _outside(self, optimizer: Optimizer) -> tuple[Namespace, Namespace]:
        """The namespace of ``optimizer``, and what stands in for its ``step``, which others may have wrapped."""
        own = optimizer.__dict__.get("step")
        known = self._optimizer_steps.get(id(optimizer))
        if known is None or known[0] is not own:
            step = torch.compiler.disable(optimizer.step, reason="updates are no part of a graph")
            known = self._optimizer_steps[id(optimizer)] = own, {"step": step}
        return optimizer.__dict__, known[1]

    def compile_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that a step passes to an optimizer, which calls it outside of all graphs, compiled by itself."""
        return torch.compile(closure, backend=self._backend) if self._running is not None else closure

    def _on_graph(self, executable: Executable) -> None:
        if self._running is not None:
            self._running.graphs += 1
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


Namespace = dict[str, Any]


def _metric_methods(module: LightningModule, recorder: LogRecorder) -> list[tuple[Namespace, Namespace]]:
    """Per metric its instance namespace, and what stands in for its methods: they are full of plain Python."""
    why = "metrics are plain Python"
    found = []
    for m in module.modules():
        if isinstance(m, (Metric, MetricCollection)):
            methods = {
                name: torch.compiler.disable(recorder.after_what_came_before(getattr(m, name)), reason=why)
                for name in _METRIC_METHODS
            }
            found.append((m.__dict__, methods | {"update": recorder.update_of(m)}))
    return found


def _replace(namespace: Namespace, replaced: Namespace) -> Namespace:
    """Write past ``nn.Module.__setattr__``, whose checks cost more than a small step; returns what was hidden."""
    originals = {k: namespace[k] for k in replaced if k in namespace}
    namespace.update(replaced)
    return originals


def _put_back(namespace: Namespace, replaced: Namespace, originals: Namespace) -> None:
    for key in replaced:
        if key in originals:
            namespace[key] = originals[key]
        else:
            namespace.pop(key, None)
