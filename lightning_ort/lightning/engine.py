"""Who computes: the options and the report that the strategies of Trainers and of Fabrics have in common."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightning_ort.environment import require_onnxruntime
from lightning_ort.report import Report
from lightning_ort.validation import choice, flag

if TYPE_CHECKING:
    import onnxruntime
    from torch.optim import Optimizer

    from lightning_ort.compiler.backend import ORTBackend
    from lightning_ort.compiler.loss_scale import LossScaling
    from lightning_ort.lightning.parallel import ParallelOptions

__all__ = ["EngineOptions"]


class EngineOptions:
    """Arguments of :class:`~lightning_ort.ORTStrategy` that say who computes, and the report of what came of them."""

    _parallel: ParallelOptions

    def _take_options(
        self,
        providers: Sequence[str] | None,
        provider_options: Sequence[Mapping[str, Any]] | Mapping[str, Mapping[str, Any]] | None,
        session_options: onnxruntime.SessionOptions | Mapping[str, Any] | None,
        placement: Literal["fastest", "fastest+inductor", "onnxruntime", "torch", "torch-channels-last", "inductor"],
        on_unsupported: Literal["torch", "error"],
        verify: bool,
        optimizer: Literal["auto", "torch", "ort"],
    ) -> None:
        """Check and keep them.

        Raises:
            OnnxRuntimeImportError, ProviderError, TypeError, ValueError: see :class:`~lightning_ort.ORTStrategy`.
        """
        require_onnxruntime()
        # these need ONNX Runtime, whose absence shall be explained and not break the import of this package
        from lightning_ort.optim.torch_optim import HookedOptimizers
        from lightning_ort.runtime.config import RuntimeConfig

        choice("on_unsupported", on_unsupported, ("torch", "error"))
        choice("optimizer", optimizer, ("auto", "torch", "ort"))
        flag("verify", verify)
        self._config = RuntimeConfig(providers, provider_options, session_options, placement)
        self._config.check()
        self._on_unsupported, self._verify = on_unsupported, verify
        self._report = Report()
        self._hooked_optimizers = HookedOptimizers(
            optimizer, self._config, verify=verify, refuse=on_unsupported == "error", report=self._report
        )

    def _backend(self, scaling: LossScaling | None = None) -> ORTBackend:
        """One by these options."""
        from lightning_ort.compiler.backend import ORTBackend

        return ORTBackend(self._config, on_unsupported=self._on_unsupported, verify=self._verify, scaling=scaling)

    def _resolve(self, device: torch.device) -> None:
        """Refuse providers that cannot compute on ``device``."""
        from lightning_ort.runtime.providers import resolve

        resolve(device, self._config.providers, self._config.provider_options)

    def _before_update(self, optimizer: Optimizer) -> None:
        """Let steps copy what gradients of further losses will need, which may be asked for after this update."""
        from lightning_ort.compiler.kept import before_update

        before_update(optimizer)

    def report(self) -> Report:
        """What ran where so far: per step function its graphs, recompilations, graph breaks, fallbacks, seconds."""
        return self._report

    def __repr__(self) -> str:
        """The arguments that are not the default ones."""
        given = {
            **{f.name: getattr(self._config, f.name) for f in dataclasses.fields(self._config)},
            **{n: getattr(self, f"_{n}", None) for n in ("device", "on_unsupported", "verify", "print_report")},
            "optimizer": self._hooked_optimizers.mode,
            **{f.name: getattr(self._parallel, f.name) for f in dataclasses.fields(self._parallel)},
        }
        defaults = inspect.signature(type(self).__init__).parameters
        of_module = given.pop("of_module") or {}
        changed = [f"{n}={p!r}" for n, p in given.items() if n in defaults and p != defaults[n].default]
        changed += [f"{n}={p!r}" for n, p in of_module.items()]
        return f"{type(self).__name__}({', '.join(changed)})"
