"""Steps on what users give: inputs are checked, failures explained, and what runs in torch is told."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.plan import Fallback
from lightning_ort.errors import CompilationError, IndexOutOfRangeError, RefusedValueError
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.trainer.arguments import gather, summary
from lightning_ort.trainer.description import Description
from lightning_ort.trainer.step import CombinedModule, Step

__all__ = ["Execution"]


class Execution:
    """Runs the training and evaluation steps of a trainer.

    Args:
        combined: model and loss, on ``device``.
        description: of inputs and outputs; gets their types at the first step.
        config: of the sessions.
        device: where the inputs go.
        half: compute in that type where ``torch.autocast`` does.

    Attributes:
        example: copies of the inputs of the first step; ``None`` before it.
    """

    def __init__(
        self,
        combined: CombinedModule,
        description: Description,
        config: RuntimeConfig,
        device: torch.device,
        *,
        half: torch.dtype | None,
    ) -> None:
        self._description, self._device = description, device
        self._fallbacks: list[Fallback] = []
        self._step = Step(combined, description, ORTBackend(config, on_fallback=self._fallbacks.extend), half=half)
        self.example: list[Tensor] | None = None
        self._accepted: list[Any] | None = None

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The inputs in the order of the description, on the device; see :func:`~.arguments.gather` for errors."""
        forms = None
        if not kwargs and len(args) == len(self._description.inputs):
            forms = [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else None for x in args]
            if forms == self._accepted:
                return list(args)
        inputs = gather(self._description, args, kwargs)
        moved = [x if x.device == self._device else x.to(self._device) for x in inputs]
        # before the first step any type is accepted, and a list may be all of the inputs
        if self.example is not None and all(map(operator.is_, moved, args)):
            self._accepted = forms
        return moved

    def train(self, inputs: Sequence[Tensor], scale: Tensor | None) -> list[Tensor]:
        """All outputs; gradients of the loss times ``scale`` are added to ``grad`` of the parameters.

        Raises:
            RuntimeError: the step cannot be executed; the message names the inputs. Values that an operator refuses are
                a RefusedValueError, indices and class labels an IndexOutOfRangeError.
        """
        return self._run(lambda: self._step.train(inputs, scale), inputs, training=True)

    def eval(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """All outputs, without gradients and in evaluation mode; errors as of :meth:`train`."""
        return self._run(lambda: self._step.eval(inputs), inputs, training=False)

    def _run(self, step: Callable[[], list[Tensor]], inputs: Sequence[Tensor], *, training: bool) -> list[Tensor]:
        try:
            return step()
        except Exception as error:
            self._fallbacks.clear()
            if isinstance(error, CompilationError) or not _is_execution_error(error):
                raise
            reason = self._step.explain(inputs, training=training) or str(error)
            kind = IndexOutOfRangeError if isinstance(error, IndexError) else RuntimeError
            if isinstance(error, RefusedValueError):
                kind = type(error)
            name = "train_step" if training else "eval_step"
            reason = reason.strip() + ("" if reason.rstrip().endswith(".") else ".")
            raise kind(f"{name} failed: {reason}{summary(self._description, inputs, reason)}") from error

    def done(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """After a step: warn the caller's caller of what runs in torch, and note types and sizes of the first one."""
        if self._fallbacks:
            told, self._fallbacks[:] = list(dict.fromkeys(self._fallbacks)), []
            for f in told:
                warnings.warn(f"{f.operator} runs in torch: {f.reason} ({f.source})", UserWarning, stacklevel=3)
        if self.example is not None:
            return
        self.example = [x.detach().clone() for x in inputs]
        for entry, x in zip(self._description.inputs, inputs, strict=True):
            entry.dtype = x.dtype
        for output, result in zip(self._description.outputs, results, strict=True):
            output.dtype = result.dtype


def _is_execution_error(error: Exception) -> bool:
    return isinstance(error, (RuntimeError, IndexError)) or type(error).__module__.startswith("onnxruntime")
