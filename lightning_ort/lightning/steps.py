"""The step functions of a LightningModule, compiled."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch._dynamo.config
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.dynamo import DYNAMO_SETTINGS, DynamoObserver, no_fast_path, with_own_code
from lightning_ort.compiler.executors.executable import Account
from lightning_ort.compiler.plan import Fallback
from lightning_ort.lightning.growing_lists import GrowingLists, appended_attributes
from lightning_ort.lightning.logged import LogRecorder, logged_so_far, results_stay
from lightning_ort.report import InTorch, Report, StepReport

__all__ = ["CompiledSteps"]

# Lightning's own machinery: plain Python that has no place in a graph.
_OUTSIDE = (
    "all_gather", "clip_gradients", "configure_gradient_clipping", "lr_scheduler_step", "lr_schedulers",
    "manual_backward", "optimizers", "print", "toggle_optimizer", "untoggle_optimizer", "toggled_optimizer",
)  # fmt: skip
_METRIC_METHODS = ("forward", "compute", "reset", "clone")


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
        # Lightning's own condition for batches that it does not see
        takes_iterator = is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)
        metrics = [m for m in module.modules() if isinstance(m, Metric)]
        self._recorder = LogRecorder(module.log, module.log_dict, metrics, needs_batch_size=takes_iterator)
        self._replaced: dict[str, Any] = {
            name: torch.compiler.disable(getattr(module, name), reason=f"{name} is plain Python") for name in _OUTSIDE
        }
        self._replaced |= {"log": self._recorder.log, "log_dict": self._recorder.log_dict}
        self._uncompiled = _uncompiled(module)
        self._replaced |= self._uncompiled
        backend.on_graph, backend.on_fallback = self._on_graph, self._on_fallback
        self._backend = backend
        self._replaced["__deepcopy__"] = _deepcopy_without(self._replaced, module, self._recorder)
        self._replaced_in = [(module.__dict__, self._replaced), *_metric_methods(module, self._recorder)]
        self._trainer: list[tuple[Namespace, Namespace]] = []
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
            method = self._uncompiled.get(name) or getattr(self.module, name)
            self._lists.expect(appended_attributes(type(self.module), method))
            # dynamic=None: sizes become symbolic once they have changed
            compiled = self._compiled[name] = torch.compile(with_own_code(method), backend=self._backend)
        outer, self._running = self._running, self.report.step(name)
        self._running.calls += 1
        compilations, failures = self._observer.compilations, self._observer.failures
        self._recorder.allowed = name != "predict_step"  # whose loop has nowhere to keep it
        self._lists.place()
        replaced_in = [*self._replaced_in, *self._trainer, *map(self._outside, self._optimizers)]
        hidden = [_replace(*replacement) for replacement in replaced_in]
        try:
            result = compiled(*args, **kwargs)
        except BaseException:
            self._recorder.discard()
            if self._observer.failures != failures:
                # Dynamo leaves the function to Python for good, but the next data may be right
                del self._compiled[name]
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

    def set_trainer(self, trainer: Trainer) -> None:
        """The Trainer that the module is trained by, whose metrics a step may read."""
        self._trainer = [
            (trainer.__dict__, {"_logger_connector": logged_so_far(trainer._logger_connector, self._recorder)})
        ]

    def set_optimizers(self, optimizers: Sequence[Any]) -> None:
        """The optimizers in use, whose updates have no place in a graph, whoever asks for them."""
        self._optimizers = [o for o in optimizers if isinstance(o, Optimizer)]
        self._optimizer_steps = {}

    def _outside(self, optimizer: Optimizer) -> tuple[Namespace, Namespace]:
        """The namespace of ``optimizer``, and what stands in for its ``step``, which others may have wrapped."""
        own = optimizer.__dict__.get("step")
        known = self._optimizer_steps.get(id(optimizer))
        if known is None or known[0] is not own:
            step = torch.compiler.disable(_step_of(optimizer, own), reason="updates are no part of a graph")
            known = self._optimizer_steps[id(optimizer)] = own, {"step": step}
        return optimizer.__dict__, known[1]

    def compile_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that a step passes to an optimizer, which calls it outside of all graphs, compiled by itself."""
        return torch.compile(closure, backend=self._backend) if self._running is not None else closure

    def _on_graph(self, executable: Account) -> None:
        if self._running is not None:
            self._running.graphs += 1
            self._running.graphs_in_torch += executable.executor != "onnxruntime"
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


Namespace = dict[str, Any]


def _step_of(optimizer: Optimizer, own: Callable[..., Any] | None) -> Callable[..., Any]:
    """A function that calls ``own``, or if that is ``None`` what the class has by then, and looks at neither before.

    ``torch.compiler.disable`` looks for attributes of its own, and a test double takes note of that.
    """

    def step(*args: Any, **kwargs: Any) -> Any:
        method = type(optimizer).step if own is None else own
        if own is None and hasattr(method, "__get__"):
            method = method.__get__(optimizer)
        return method(*args, **kwargs)

    # schedulers look for what they have left there
    of_method = getattr(optimizer.step, "__func__", optimizer.step)
    if isinstance(of_method, FunctionType):
        functools.update_wrapper(step, of_method)
    return step


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
            methods["update"] = recorder.update_of(m)
            methods["__deepcopy__"] = _deepcopy_without(methods, m, recorder)
            found.append((m.__dict__, methods))
    return found


def _deepcopy_without(standins: Namespace, owner: torch.nn.Module, recorder: LogRecorder) -> Callable[..., Any]:
    """What ``copy.deepcopy`` calls in a step: a copy with the stand-ins of ``owner`` would act on ``owner``."""

    def deepcopy(memo: dict[int, Any]) -> Any:
        placed = {k: owner.__dict__.pop(k) for k, v in standins.items() if owner.__dict__.get(k) is v}
        try:
            return copy.deepcopy(owner, memo)
        finally:
            owner.__dict__.update(placed)

    return torch.compiler.disable(recorder.after_what_came_before(deepcopy), reason="copies are no part of a graph")


def _uncompiled(module: LightningModule) -> dict[str, Callable[..., Any]]:
    """The methods that a Trainer put others in the place of, because it was given ``torch.compile(module)``."""
    context = module._compiler_ctx or {}
    return {name.removeprefix("original_"): m for name, m in context.items() if name.startswith("original_")}


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
