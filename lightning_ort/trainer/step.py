"""A model with its loss as one compiled step."""

from __future__ import annotations

import contextlib
import inspect
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.distributions import checked_distributions
from lightning_ort.compiler.dynamo import Preparation, compiled_apart, no_accounts
from lightning_ort.compiler.plan import Fallback
from lightning_ort.compiler.reference import Buffers, ForkedRNG
from lightning_ort.compiler.transformer_modules import transformers_in_graphs
from lightning_ort.errors import CompilationError, IndexOutOfRangeError, RefusedValueError
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.trainer.description import Description, ResultError, check_results, gather, summary

__all__ = ["CombinedModule", "Execution", "Step"]


class CombinedModule(nn.Module):
    """A model and a loss function as one module, from all described inputs to all described outputs.

    Args:
        model: gets the inputs by name if its ``forward`` has arguments of all those names, otherwise in order.
        loss_fn: gets what the model returned and the label, which is the one input that is no argument of
            ``forward``, or else the last. Its result becomes the first output. ``None`` if the model returns the loss.
        description: of the inputs and outputs.

    Raises:
        ValueError: with ``loss_fn``, the loss is not described as the first output.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Tensor] | None, description: Description) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn
        names = [entry.name for entry in description.inputs]
        arguments = _arguments(model)
        label = None
        if loss_fn is not None:
            if description.loss not in (None, 0):
                raise ValueError(
                    "With loss_fn the loss is the first output, but model_desc marks "
                    f"{description.outputs[description.loss or 0].name!r}, which is not the first."
                )
            others = [i for i, name in enumerate(names) if name not in arguments]
            label = others[0] if len(others) == 1 else len(names) - 1
        self._label = label
        self._order = [i for i in range(len(names)) if i != label]
        by_name = all(names[i] in arguments for i in self._order)
        self._names = [names[i] for i in self._order] if by_name else None

    def forward(self, *inputs: Tensor) -> list[Any]:
        """All outputs in the order of the description."""
        mine = [inputs[i] for i in self._order]
        if self._names is None:
            prediction = self.model(*mine)
        else:
            prediction = self.model(**dict(zip(self._names, mine, strict=True)))
        results = _flat(prediction)
        if self.loss_fn is None or self._label is None:
            return results
        return [self.loss_fn(prediction, inputs[self._label]), *results]


def _arguments(model: nn.Module) -> set[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds}


def _flat(prediction: Any) -> list[Any]:
    if isinstance(prediction, Mapping):
        prediction = tuple(prediction.values())
    if isinstance(prediction, (tuple, list)):
        return [result for part in prediction for result in _flat(part)]
    return [prediction]


class Step:
    """Runs :class:`CombinedModule` through ONNX Runtime, with or without gradients.

    A call that fails leaves buffers, gradients and training modes as they were.

    Args:
        combined: the module.
        description: of its inputs and outputs.
        backend: where its graphs go.
        half: compute in float16 where ``torch.autocast`` does.
    """

    def __init__(
        self, combined: CombinedModule, description: Description, backend: ORTBackend, *, half: torch.dtype | None
    ) -> None:
        self._combined, self._description = combined, description
        self._half = half
        self._train = compiled_apart(_step_function(combined, description.loss, half), backend)
        self._eval = compiled_apart(_step_function(combined, None, half), backend)
        self._eager = _step_function(combined, None, half)
        self._dynamo = Preparation()
        self._buffers = Buffers(combined)

    def train(self, inputs: Sequence[Tensor], scale: Tensor | None) -> list[Tensor]:
        """All outputs; gradients of the loss times ``scale`` are added to ``grad`` of the parameters."""
        loss = self._description.loss
        assert loss is not None
        with self._unharmed(training=True), torch.enable_grad():
            objective, results = self._train(scale, *inputs)
            check_results(self._description, results)
            if not (isinstance(objective, Tensor) and objective.requires_grad):
                raise RuntimeError(
                    f"The loss {self._description.outputs[loss].name!r} depends on no weight that is trained."
                )
            objective.backward()
        results[loss] = results[loss].detach()
        return results

    def eval(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """All outputs, without gradients and in evaluation mode."""
        with self._unharmed(training=False), torch.no_grad():
            _, results = self._eval(None, *inputs)
            check_results(self._description, results)
        return results

    def explain(self, inputs: Sequence[Tensor], *, training: bool) -> str:
        """What torch says about inputs on which ONNX Runtime failed; an empty string if it says nothing."""
        device = next((x.device for x in inputs), torch.device("cpu"))
        try:
            with ForkedRNG(device), self._unharmed(training=training), torch.no_grad():
                self._eager(None, *inputs)
                raise _NothingWrong  # only an error has the buffers put back
        except _NothingWrong:
            return ""
        except Exception as error:
            return str(error)

    @contextlib.contextmanager
    def _unharmed(self, *, training: bool) -> Iterator[None]:
        """Put the module into that mode for a while; put buffers back if the call fails."""
        combined = self._combined
        modes = None
        if combined.model.training != training:
            modes = [(m, m.training) for m in combined.modules()]
            combined.train(training)
        put_back = self._buffers.note()
        try:
            with self._dynamo.when_compiling(), transformers_in_graphs(), checked_distributions(), no_accounts():
                yield
        except BaseException:
            put_back()
            raise
        finally:
            if modes is not None:
                for module, mode in modes:
                    module.training = mode


class _NothingWrong(Exception):
    pass


def _step_function(
    combined: CombinedModule, loss: int | None, half: torch.dtype | None
) -> Callable[..., tuple[Tensor | None, list[Any]]]:
    def step(scale: Tensor | None, *inputs: Tensor) -> tuple[Tensor | None, list[Any]]:
        if half is None:
            results = combined(*inputs)
        else:
            with torch.autocast(inputs[0].device.type, half):
                results = combined(*inputs)
        objective = None
        if loss is not None and loss < len(results):
            objective = results[loss]
            if scale is not None:
                objective = objective.float() * scale
        # one output alone has a gradient, the objective, so that it is computed in the same run
        return objective, [
            r.detach() if isinstance(r, Tensor) and not (i == loss and scale is None) else r
            for i, r in enumerate(results)
        ]

    return step


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
        """The inputs in the order of the description, on the device; see :func:`~.description.gather` for errors."""
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
            # sizes and places of outputs are no values of inputs
            about_values = "" if isinstance(error, ResultError) else reason
            raise kind(f"{name} failed: {reason}{summary(self._description, inputs, about_values)}") from error

    def done(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """After a step: warn the caller's caller of what runs in torch, and note types and sizes of the first one."""
        if self._fallbacks:
            told, self._fallbacks[:] = list(dict.fromkeys(self._fallbacks)), []
            for f in told:
                warnings.warn(f"{f.operator} runs in torch: {f.reason} ({f.source})", UserWarning, stacklevel=3)
        if self.example is not None:
            return
        self.example = [x.detach().clone() for x in inputs]
        self._description.set_types(inputs, results)


def _is_execution_error(error: Exception) -> bool:
    return isinstance(error, (RuntimeError, IndexError)) or type(error).__module__.startswith("onnxruntime")
