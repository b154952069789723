"""What is computed from the inputs of a step: loss and results, as one module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_ort.ondevice.generation.losses import Loss

__all__ = ["Inference", "LossOf", "Objective", "StepLoss"]

LOSS = "loss"


class Objective(nn.Module):
    """From the tensors of a step to its results by name; the model is the submodule ``model``.

    Attributes:
        additional: names of the results that are given besides the first; ``None`` for all.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.additional: Sequence[str] | None = None

    def results(self, *inputs: Tensor) -> dict[str, Any]:
        """Everything that is computed, the loss first."""
        raise NotImplementedError

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        found = {name: value for name, value in self.results(*inputs).items() if isinstance(value, Tensor)}
        if self.additional is None:
            return found
        unknown = [name for name in self.additional if name not in found]
        if unknown:
            raise ValueError(f"there is no result {', '.join(map(repr, unknown))}; there are {', '.join(found)}")
        return {name: found[name] for name in dict.fromkeys([next(iter(found)), *self.additional])}


class Inference(Objective):
    """What ``model`` returns.

    Args:
        model: gets its inputs in order, or by the names ``keywords``.
        keywords: per input its name, or ``None`` for one that is given in order.
        output_names: of its results; by default their keys, ``output``, or ``output_0`` and so on.
    """

    def __init__(
        self, model: nn.Module, keywords: Sequence[str | None], output_names: Sequence[str] | None = None
    ) -> None:
        super().__init__(model)
        self._keywords, self._output_names = list(keywords), output_names

    def called(self, inputs: Sequence[Tensor]) -> Any:
        """What the model itself returns."""
        pairs = list(zip(self._keywords, inputs, strict=True))
        return self.model(*[x for k, x in pairs if k is None], **{k: x for k, x in pairs if k is not None})

    def results(self, *inputs: Tensor) -> dict[str, Any]:
        return named_results(self.called(inputs), self._output_names)


class LossOf(Objective):
    """``loss_fn`` of what a model returns and the targets, then what it returns.

    Args:
        inference: the model; takes the first inputs.
        loss_fn: gets the results of the model and the remaining inputs; ``None`` where the model returns the loss
            first.
        loss_inputs: names of the results that ``loss_fn`` gets, by default what the model returns.
    """

    def __init__(self, inference: Inference, loss_fn: Loss | None, loss_inputs: Sequence[str] | None = None) -> None:
        super().__init__(inference.model)
        self.loss_fn = loss_fn
        self._loss_inputs, self._inference = loss_inputs, [inference]  # a list, or its tensors were named twice

    def results(self, *inputs: Tensor) -> dict[str, Any]:
        inference = self._inference[0]
        count = len(inference._keywords)
        returned = inference.called(inputs[:count])
        results = named_results(returned, inference._output_names)
        if self.loss_fn is None:
            first = next(iter(results.values()), None)
            _check(first, "The first result of the model")
            return results
        if self._loss_inputs is not None:
            missing = [n for n in self._loss_inputs if n not in results]
            if missing:
                raise ValueError(f"loss_input_names: the model has no result {', '.join(map(repr, missing))}")
            arguments = [results[n] for n in self._loss_inputs]
        else:
            arguments = [returned]
        loss = self.loss_fn(*arguments, *inputs[count:])
        _check(loss, "The loss function's result")
        return {LOSS: loss, **{name: value for name, value in results.items() if name != LOSS}}


class StepLoss(Objective):
    """The loss that ``training_step`` of a LightningModule returns, then the other tensors that it returns.

    Args:
        model: the LightningModule.
        batch: an example; its tensors are the inputs.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        super().__init__(model)
        self._leaves, self._spec = pytree.tree_flatten(batch)

    def results(self, *inputs: Tensor) -> dict[str, Any]:
        given = iter(inputs)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        batch = pytree.tree_unflatten(leaves, self._spec)
        returned = self.model.training_step(batch, 0)  # type: ignore[operator]
        rest: dict[str, Any] = {}
        if isinstance(returned, Mapping):
            rest = {str(k): v for k, v in returned.items() if k != LOSS}
            returned = returned.get(LOSS)
        _check(returned, "What training_step returns as its loss")
        return {LOSS: returned, **rest}


def named_results(returned: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """Tensors by name."""
    if isinstance(returned, Mapping):
        found = {str(key): value for key, value in returned.items() if isinstance(value, Tensor)}
    else:
        parts = [p for p in pytree.tree_leaves(returned) if isinstance(p, Tensor)]
        found = {"output": parts[0]} if len(parts) == 1 else {f"output_{i}": p for i, p in enumerate(parts)}
    if names is not None:
        if len(names) != len(found):
            raise ValueError(f"output_names has {len(names)} names for the {len(found)} results of the model")
        found = dict(zip(names, found.values(), strict=True))
    return found


def _check(loss: Any, what: str) -> None:
    if not isinstance(loss, Tensor):
        raise ValueError(f"{what} is a {type(loss).__name__}; expected a tensor with one number")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ValueError(f"{what} is {loss.dtype} of shape {tuple(loss.shape)}; expected one floating-point number")
