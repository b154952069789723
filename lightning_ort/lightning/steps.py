"""The step functions of a LightningModule, compiled."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.executors.executable import timed_in_torch
from lightning_ort.compiler.hand_out import hand_out, node_of_loss
from lightning_ort.lightning.compiled import CompiledMethods
from lightning_ort.lightning.logged import LogRecorder, logged_so_far, results_stay
from lightning_ort.lightning.precision import ORTPrecision
from lightning_ort.lightning.turns import Turns, alone
from lightning_ort.lightning_packages import everywhere, overrides, package_of, pl
from lightning_ort.report import Report, StepReport, timeline
from lightning_ort.runtime.heap import keep_freed_memory

__all__ = ["CompiledSteps"]

# Lightning's own machinery: plain Python that has no place in a graph.
_OUTSIDE = (
    "all_gather", "clip_gradients", "configure_gradient_clipping", "lr_scheduler_step", "lr_schedulers",
    "manual_backward", "optimizers", "print", "toggle_optimizer", "untoggle_optimizer", "toggled_optimizer",
)  # fmt: skip
# what a loss passes on its way to torch's engine, as it is before users or their tests put something in its place
_BACKWARD = [
    torch.Tensor.backward,
    ORTPrecision.backward,
    *[kind.backward for kind in everywhere("plugins.precision:Precision")],
    *[kind.backward for kind in everywhere("core.module:LightningModule")],
]
_LIGHTNINGS = {
    name: [getattr(kind, name) for kind in everywhere("core.module:LightningModule")] for name in ("log", "log_dict")
}
_METRIC_METHODS = ("forward", "compute", "reset", "clone")


class CompiledSteps(CompiledMethods):
    """The step functions of a LightningModule, and all that one says to its Trainer meanwhile.

    Args:
        module: whose steps are called.
        backend: where their graphs go.
        report: what is known so far; gets everything that happens from now on.
    """

    def __init__(self, module: pl.LightningModule, backend: ORTBackend, report: Report) -> None:
        super().__init__(module, backend, report)
        # Lightning's own condition for batches that it does not see
        in_signature = package_of(module).get("utilities.signature_utils:is_param_in_hook_signature")
        takes_iterator = in_signature(module.training_step, "dataloader_iter", explicit=True)
        metrics = [m for m in module.modules() if isinstance(m, Metric)]
        self._recorder = LogRecorder(module.log, module.log_dict, metrics, needs_batch_size=takes_iterator)
        own: Namespace = {
            name: torch.compiler.disable(getattr(module, name), reason=f"{name} is plain Python") for name in _OUTSIDE
        }
        own |= self._logging(module)
        self._uncompiled = _uncompiled(module)
        own |= self._uncompiled
        own["__deepcopy__"] = _deepcopy_without(own, module, self._recorder)
        self._patches: list[Patch] = [(module.__dict__, own), *_metric_patches(module, self._recorder)]
        self._trainer_patches: list[Patch] = []
        self._plain_backward, self._loss_node = False, None
        self._precision: Any = None
        self._backward: tuple[Any, ...] = ()
        self._optimizers: list[Optimizer] = []
        self._optimizer_patches: dict[int, tuple[Any, Namespace]] = {}
        self._turns: dict[str, Turns | None] = {}
        self._undecided: Turns | None = None  # those of the latest call

    def _logging(self, module: pl.LightningModule) -> Namespace:
        """What collects, in the place of Lightning's methods, and those of the user's own at once and in order."""
        names = ("log", "log_dict")
        if all(getattr(type(module), name) in _LIGHTNINGS[name] for name in names):
            return {"log": self._recorder.log, "log_dict": self._recorder.log_dict}
        why = "the module has a method log or log_dict of its own"
        now = self._recorder.after_what_came_before
        return {name: torch.compiler.disable(now(getattr(module, name)), reason=why) for name in names}

    @override
    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the module's method ``name``: in graphs, unless it is faster as it is."""
        turns = self._turns[name] if name in self._turns else self._begin_turns(name)
        if turns is None or self._running is not None or (turns.decided and not turns.step.as_it_is):
            return super().__call__(name, *args, **kwargs)
        as_it_is = turns.rest or turns.next((args, kwargs), self._observer.compilations, self._trained())
        turns.calls += 1
        self._undecided = None if turns.decided else turns
        result = self._as_it_is(turns.step, args, kwargs) if as_it_is else super().__call__(name, *args, **kwargs)
        if not turns.decided:
            turns.note()
        return result

    def _trained(self) -> int:
        """How many parameters are."""
        return sum(p.requires_grad for o in self._optimizers for group in o.param_groups for p in group["params"])

    def leaves(self, name: str) -> bool:
        """Whether the call of ``name`` that begins, which is counted then, is Lightning's own to make."""
        turns = self._turns.get(name)
        if turns is None or not turns.rest or timeline.present is not None:
            return False
        step = turns.step
        if step.calls >= step.timing.due:
            return False
        self._count(step)
        turns.calls += 1
        return True

    def is_decided(self, name: str) -> bool:
        """Whether ``name``, which has been called, is called in one way from now on."""
        turns = self._turns.get(name)
        return turns is None or turns.decided

    def _begin_turns(self, name: str) -> Turns | None:
        trainer, module, step = cast(Any, self._trainer), cast(Any, self.module), self.report.step(name)
        # what an earlier fit has found may not hold for this one
        step.turns, step.as_it_is, step.recompiled_calls = {}, False, 0
        turns, strategy = None, trainer.strategy
        # as many calls as the others need not be made of what is not for training
        together = trainer.world_size == 1 or (name == "training_step" and strategy.waits_each_step)
        device = strategy.root_device
        if together and not self._uncompiled and self._backend.measures():

            def parts() -> list[Any]:
                shapes = [(tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters()]
                called = type(module).__module__, type(module).__qualname__
                return [called, shapes, trainer.precision, trainer.world_size]

            def means(numbers: Sequence[float]) -> list[float]:
                mine = torch.tensor([float(x) for x in numbers], dtype=torch.float64, device=device)
                return strategy.reduce(mine, reduce_op="mean").tolist()

            phases = 2 if name == "training_step" and module.automatic_optimization else 1
            by = alone if trainer.world_size == 1 else means
            turns = Turns(step, parts, self._backend.config, phases, device, by)
        self._turns[name] = turns
        return turns

    def _as_it_is(self, step: StepReport, args: Any, kwargs: Mapping[str, Any]) -> Any:
        self._count(step)
        method = getattr(self.module, step.name)
        if step.as_it_is and step.calls >= step.timing.due:
            self._begin_timing(step)
            result = timed_in_torch(method)(*args, **kwargs)
            assert timeline.present is not None
            timeline.present.leave(step.name)
            return result
        if timeline.present is not None:
            timeline.close()
        return method(*args, **kwargs)

    def note_backward(self) -> None:
        """The backward of the step that was called last has ended."""
        turns, self._undecided = self._undecided, None
        # by hand, it is a part of the call
        if turns is not None and cast(Any, self.module).automatic_optimization:
            turns.note()

    @override
    def install(self) -> None:
        super().install()
        self._settings.enter_context(results_stay(self.module))
        if self._device == "cpu":
            self._settings.callback(keep_freed_memory(self))

    @override
    def _method(self, name: str) -> Callable[..., Any]:
        return self._uncompiled.get(name) or super()._method(name)

    @override
    def _before(self, name: str) -> None:
        self._recorder.allowed = name != "predict_step"  # whose loop has nowhere to keep it

    @override
    def _around(self) -> contextlib.AbstractContextManager[None]:
        return _Patched([*self._patches, *self._trainer_patches, *map(self._optimizer_patch, self._optimizers)])

    @override
    def _discard(self) -> None:
        self._recorder.discard()

    @override
    def _after(self) -> None:
        self._recorder.flush()

    def set_trainer(self, trainer: pl.Trainer) -> None:
        """The Trainer that the module is trained by, whose metrics a step may read."""
        self._trainer, self._device = trainer, trainer.strategy.root_device.type
        self._turns = {}
        self._trainer_patches = [
            (trainer.__dict__, {"_logger_connector": logged_so_far(trainer._logger_connector, self._recorder)})
        ]

    def set_optimizers(self, optimizers: Sequence[Any]) -> None:
        """The optimizers in use, whose updates have no place in a graph, whoever asks for them."""
        self._optimizers = [o for o in optimizers if isinstance(o, Optimizer)]
        self._optimizer_patches = {}

    def _optimizer_patch(self, optimizer: Optimizer) -> Patch:
        """Of the ``step`` of ``optimizer``, which others may have wrapped."""
        own = optimizer.__dict__.get("step")
        known = self._optimizer_patches.get(id(optimizer))
        if known is None or known[0] is not own:
            step = torch.compiler.disable(_step_of(optimizer, own), reason="updates are no part of a graph")
            known = self._optimizer_patches[id(optimizer)] = own, {"step": step}
        return optimizer.__dict__, known[1]

    def expect_backward(self, precision: Any) -> None:
        """A fit begins: find out whether its backward, as ``precision`` has it, is torch's and nothing more."""
        self._precision = precision
        self._backward = self._backward_now()
        module = cast(Any, self.module)
        self._plain_backward = (
            module.automatic_optimization
            and all(method in _BACKWARD for method in self._backward[:3])
            and not any(self._backward[3:6])
            and not any(map(_sees_losses, (module, *cast(Any, self._trainer).callbacks)))
            and not any(isinstance(m, DistributedDataParallel) for m in module.modules())
        )

    def _backward_now(self) -> tuple[Any, ...]:
        """What a loss passes on its way to torch's engine, who has put something of his own there, and who sees it."""
        module, precision = cast(Any, self.module), self._precision
        own = vars(module)
        return (
            type(module).backward,
            getattr(type(precision), "backward", None),
            torch.Tensor.backward,
            "backward" in own,
            "backward" in vars(precision),
            getattr(precision, "scaling", None) is not None,
            type(module).on_before_backward,
            own.get("on_before_backward"),
            len(cast(Any, self._trainer).callbacks),
        )

    def note_loss(self, output: Any) -> None:
        """Remember what computed the loss that the training step has given, for :meth:`hand_out`.

        Not where something of the user's may wait for gradients on their way. Nothing that a step does in one graph
        can, but for hooks, which the tensors show that have them.
        """
        self._loss_node = None
        turns = self._turns.get("training_step")
        if self._precision is None or (turns is not None and turns.step.as_it_is):
            return
        step = self.report.step("training_step")
        if self._backward != self._backward_now():  # somebody has put something in its place since the fit began
            self.expect_backward(self._precision)
        if self._plain_backward and not (step.graph_breaks or step.in_torch):
            self._loss_node = node_of_loss(output.get("loss") if isinstance(output, Mapping) else output)

    def hand_out(self, loss: torch.Tensor) -> bool:
        """Do what ``loss.backward()`` would, without torch's engine, if that is possible; whether it was."""
        node, self._loss_node = self._loss_node, None
        return node is not None and hand_out(loss, node)

    def compile_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that a step passes to an optimizer, which calls it outside of all graphs, compiled by itself.

        The one that Lightning passes in the place of none is left as it is: wrapping takes longer than a small update.
        """
        if self._running is None or closure in everywhere("core.optimizer:do_nothing_closure"):
            return closure
        if not isinstance(closure, (FunctionType, MethodType)):  # torch asks it for options, and a test double has any
            return torch.compile(lambda: closure(), backend=self._backend)
        return torch.compile(closure, backend=self._backend)


def _sees_losses(hooks: Any) -> bool:
    """Whether a module, a callback, or what a test has in its place is given the loss before its backward."""
    known = isinstance(hooks, (*everywhere("core.module:LightningModule"), *everywhere("callbacks:Callback")))
    return not known or overrides("on_before_backward", hooks)


Namespace = dict[str, Any]
Patch = tuple[Namespace, Namespace]
"""The namespace of an instance, and what stands there during a step."""


class _Patched(contextlib.AbstractContextManager[None]):
    """Patches, for a block, past ``nn.Module.__setattr__``, whose checks cost more than a small step."""

    __slots__ = ("_originals", "_patches")

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._patches = patches

    def __enter__(self) -> None:
        self._originals = [{k: namespace[k] for k in values if k in namespace} for namespace, values in self._patches]
        for namespace, values in self._patches:
            namespace.update(values)

    def __exit__(self, *exc: object) -> None:
        for (namespace, values), originals in zip(self._patches, self._originals, strict=True):
            for name in values:
                if name in originals:
                    namespace[name] = originals[name]
                else:
                    namespace.pop(name, None)


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


def _metric_patches(module: pl.LightningModule, recorder: LogRecorder) -> list[Patch]:
    """Of the methods of metrics, which are full of plain Python."""
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


def _uncompiled(module: pl.LightningModule) -> dict[str, Callable[..., Any]]:
    """The methods that a Trainer put others in the place of, because it was given ``torch.compile(module)``."""
    context = module._compiler_ctx or {}  # private: Lightning's own strategies ask for no more than its absence
    return {name.removeprefix("original_"): m for name, m in context.items() if name.startswith("original_")}
