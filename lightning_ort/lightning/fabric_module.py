"""A module of a Fabric, whose ``forward`` runs in ONNX Runtime."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from lightning_ort.lightning.compiled import CompiledMethods
from lightning_ort.lightning_packages import PACKAGES
from lightning_ort.report import StepReport
from lightning_ort.runtime.heap import keep_freed_memory

if TYPE_CHECKING:
    from lightning_ort.lightning.fabric import ORTFabricStrategy

__all__ = ["CompiledModule"]

_NOT_TIMED = "the loss, its backward and the update are the loop's, of which a strategy does not see all"


class CompiledModule(nn.Module):
    """Stands before ``module``, and inside of a ``DistributedDataParallel``: Fabric calls it, and nobody else has it.

    Args:
        module: what was given to ``fabric.setup``; its state keeps its names, and its attributes are as they were
            whenever no call of it is running.
        strategy: says how, and keeps the report.
    """

    def __init__(self, module: nn.Module, strategy: ORTFabricStrategy) -> None:
        super().__init__()
        self.module, self._strategy = module, strategy
        self._methods: _Methods | None = None

    # a loop that is compiled as a whole gets no graph that this would be a part of
    @override
    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What ``module`` computes, or the method of it that Fabric has put in the place of its ``forward``."""
        if self._methods is None:
            self._methods = _Methods(self.module, self._strategy)
        namespace = self.module.__dict__
        name, own = "forward", namespace.get("forward")
        redirection = _redirection(own)
        if redirection is not None:
            name, own = redirection
            if getattr(own, "__func__", None) is type(self.module).forward:
                own = None
            _place(namespace, own)
            return self._methods(name, *args, **kwargs)

        def enter(*args: Any, **kwargs: Any) -> Any:
            _place(namespace, own)
            assert self._methods is not None
            return self._methods(name, *args, **kwargs)

        # hooks of the module itself run before and after what is compiled, as they do under torch.compile(module)
        namespace["forward"] = enter
        try:
            return self.module(*args, **kwargs)
        finally:
            _place(namespace, own)

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    @override
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # what has been compiled is of this module, and not of a copy
        return {**self.__dict__, "_methods": None}


def _place(namespace: dict[str, Any], forward: Any) -> None:
    """Let a module have the ``forward`` that it had, past the checks of ``nn.Module.__setattr__``."""
    if forward is None:
        namespace.pop("forward", None)
    else:
        namespace["forward"] = forward


def _redirection(forward: Any) -> tuple[str, Any] | None:
    """The name of the method that Fabric has put in the place of ``forward``, and what was there before.

    Private: Fabric calls a marked method by a function in the place of ``forward`` that knows it by name, which is
    found among the variables of that function. Not found, the method would run in torch.
    """
    if not isinstance(forward, FunctionType) or forward.__module__ not in _WRAPPERS:
        return None
    cells = zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True)
    variables = {name: cell.cell_contents for name, cell in cells}
    if "method_name" not in variables:
        return None
    return variables["method_name"], variables.get("original_forward")


_WRAPPERS = frozenset(f"{package.fabric}.wrappers" for package in PACKAGES)


class _Methods(CompiledMethods):
    """The methods of one module; torch's settings are others only while one of them runs."""

    def __init__(self, module: nn.Module, strategy: ORTFabricStrategy) -> None:
        super().__init__(module, strategy._backend(), strategy.report(), f"{strategy.name_of(module)}.")
        self._device = strategy.root_device.type
        if self._device == "cpu":
            keep_freed_memory(self)

    @override
    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._running is not None:  # the module has called itself
            return self._method(name)(*args, **kwargs)
        self.install()
        try:
            return super().__call__(name, *args, **kwargs)
        finally:
            self.remove()

    @override
    def _prepared(self) -> contextlib.AbstractContextManager[None]:
        return self._dynamo.when_compiling()

    @override
    def _method(self, name: str) -> Callable[..., Any]:
        method = super()._method(name)
        if not (getattr(method, "__module__", None) or "").startswith("torch."):
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        return call  # Dynamo begins in no function of torch, such as nn.Sequential.forward

    @override
    def _mode(self, name: str) -> tuple[Hashable, bool]:
        # a Trainer has steps for them; as one function they could exceed Dynamo's limit of compilations
        inference = torch.is_inference_mode_enabled()
        return (name, self.module.training, torch.is_grad_enabled(), inference), inference

    @override
    def _begin_timing(self, step: StepReport) -> None:
        step.timing.due, step.timing.not_timed = sys.maxsize, _NOT_TIMED
