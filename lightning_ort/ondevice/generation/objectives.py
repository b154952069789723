"""What is computed from the inputs of a step: loss and results, as one module."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from lightning_ort.compiler.aot.forward import Region, weighted_sum
from lightning_ort.compiler.aot.inputs import InputInfo
from lightning_ort.ondevice.generation.inputs import hints_of
from lightning_ort.onnx_reader import OnnxModule

__all__ = [
    "Inference",
    "Loss",
    "LossOf",
    "LossType",
    "ModuleForward",
    "Objective",
    "StepLoss",
    "is_block",
    "loss_function",
    "target_name",
]

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
            missing = ", ".join(map(repr, unknown))
            raise ResultError(f"additional_output_names: there is no result {missing}; there are {', '.join(found)}.")
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
                raise ResultError(
                    f"loss_input_names: the model has no result {', '.join(map(repr, missing))}; it has "
                    f"{', '.join(results)}."
                )
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
            raise ResultError(f"output_names has {len(names)} names for the {len(found)} results of the model.")
        found = dict(zip(names, found.values(), strict=True))
    return found


class ResultError(ValueError):
    """What the model returns is no loss, or not what the user has named."""


def _check(loss: Any, what: str) -> None:
    if not isinstance(loss, Tensor):
        raise ResultError(f"{what} is a {type(loss).__name__}; expected a tensor with one number.")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ResultError(
            f"{what} is {loss.dtype} of shape {tuple(loss.shape)}; expected one floating-point number, such as a mean."
        )


Loss = Callable[..., Tensor]
"""From the results of a model and the targets to a scalar."""


class LossType(enum.Enum):
    """Losses of artifacts that have a name."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


_NAMED: dict[str, Callable[[], nn.Module]] = {
    "MSELoss": nn.MSELoss,
    "CrossEntropyLoss": nn.CrossEntropyLoss,
    "BCEWithLogitsLoss": nn.BCEWithLogitsLoss,
    "L1Loss": nn.L1Loss,
}


def loss_function(loss: Any) -> Loss | None:
    """``loss`` itself, or the function of a name such as ``"MSELoss"``, or of a :class:`LossType` (ONNX Runtime's too).

    Raises:
        ValueError: an unknown name.
        TypeError: something that cannot be called.
    """
    if loss is None:
        return None
    name = loss if isinstance(loss, str) else getattr(loss, "name", None)
    if isinstance(name, str) and not isinstance(loss, nn.Module) and not callable(loss):
        if name not in _NAMED:
            raise ValueError(f"loss={loss!r}: expected one of {', '.join(_NAMED)}, or a function.")
        return _NAMED[name]()
    if not callable(loss) or isinstance(loss, type):
        raise TypeError(
            f"loss={loss!r} is no loss function; expected one of {', '.join(_NAMED)}, a function of torch tensors, or "
            "an onnxblock for an ONNX model."
        )
    if is_block(loss):
        raise TypeError(
            f"loss={loss!r} is an onnxblock, which adds to an ONNX model; for a module write the loss in torch."
        )
    return loss


def is_block(value: Any) -> bool:
    """Whether ``value`` is an ``onnxblock.Block``, of this package or of ONNX Runtime's training build."""
    places = ("lightning_ort.ondevice.onnxblock.", "onnxruntime.training.onnxblock.")
    return any(b.__name__ == "Block" and b.__module__.startswith(places) for b in type(value).__mro__)


def target_name(loss: Any) -> str:
    """What the input for the targets is called where nobody says: as in ONNX Runtime's artifacts."""
    return "labels" if isinstance(loss, nn.CrossEntropyLoss) else "target"


class ModuleForward:
    """Makes a region of ``objective``; see :class:`~lightning_ort.compiler.aot.forward.Forward`.

    Args:
        objective: what is computed.
        infos: its inputs.
        example: of the inputs; it is traced with those sizes before others.

    Attributes:
        parameters: name to parameter.
        buffers: name to buffer.
        hints: sizes to trace with.
        requiring_grad: names of the parameters that require a gradient.
        first_names: every name of a parameter or buffer to that under which it is kept.

    Raises:
        ValueError: an input is called like a parameter.
    """

    def __init__(
        self, objective: Objective, infos: Sequence[InputInfo], example: Mapping[str, Tensor] | None = None
    ) -> None:
        self.objective, self.infos = objective, list(infos)
        self.hints = hints_of(infos, example)
        self.input_names = [i.name for i in infos]
        self.output_names: list[str] = []
        self.parameters: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.requiring_grad: list[str] = []
        self.first_names: dict[str, str] = {}
        self._paths: dict[str, str] = {}
        self._first: dict[Tensor, str] = {}
        model = objective.model
        known = {}
        if isinstance(model, OnnxModule):
            known = {f"model.{path}": name for path, name in (model.parameter_names | model.buffer_names).items()}
        for path, parameter in objective.named_parameters(remove_duplicate=False):
            name = self._name(path, parameter, known)
            if name in self.parameters:
                continue
            self.parameters[name] = parameter.detach()
            if parameter.requires_grad:
                self.requiring_grad.append(name)
        for path, buffer in objective.named_buffers(remove_duplicate=False):
            name = self._name(path, buffer, known)
            if name not in self.parameters:
                self.buffers[name] = buffer
        clash = sorted(set(self.input_names) & set(self._paths))
        if clash:
            raise ValueError(f"{clash} are names of inputs and of parameters; give the inputs other names.")

    def _name(self, path: str, tensor: Tensor, known: dict[str, str]) -> str:
        """The first name of a tensor that is found at ``path``."""
        name = known.get(path, path.removeprefix("model."))
        first = self._first.setdefault(tensor, name)
        self.first_names[name] = first
        self._paths.setdefault(first, path)
        return first

    def call(self, tensors: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """The results with these parameters and buffers, which are changed where the objective changes its own."""
        state = {self._paths[n]: t for n, t in tensors.items()}
        results = torch.func.functional_call(self.objective, state, tuple(inputs))
        for name, tensor in tensors.items():
            # a buffer that was given another tensor instead of being changed
            if state[self._paths[name]] is not tensor:
                tensor.copy_(state[self._paths[name]])
        self.output_names = list(results)
        return list(results.values())

    def region(self, differentiated: Sequence[str]) -> Region:
        """The objective as a function of its tensors and inputs."""
        tensors = self.parameters | self.buffers
        root = nn.Module()
        root.call = _Call(self, list(tensors), differentiated)
        graph = fx.Graph()
        places = [graph.placeholder(f"tensor_{i}") for i in range(len(tensors))]
        inputs = [graph.placeholder(f"input_{i}") for i in range(len(self.infos))]
        graph.output(graph.call_module("call", (places, inputs)))
        return Region(fx.GraphModule(root, graph), tensors)


class _Call(nn.Module):
    """The objective on other tensors than its own, after the sum of what is differentiated."""

    def __init__(self, forward: ModuleForward, names: Sequence[str], differentiated: Sequence[str]) -> None:
        super().__init__()
        # in a list, so that the objective does not become a part of this module
        self._forward, self._names, self._differentiated = [forward], list(names), list(differentiated)

    def forward(self, tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Any]:
        forward = self._forward[0]
        results = forward.call(dict(zip(self._names, tensors, strict=True)), inputs)
        named = dict(zip(forward.output_names, results, strict=True))
        names = self._differentiated or forward.output_names[:1]
        return [weighted_sum([named[n] for n in names], [None] * len(names)), *results]
