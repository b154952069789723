"""The objectives of what users give: a module, a LightningModule, an ONNX model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_ort.compiler.aot.inputs import InputInfo, info_of, input_infos
from lightning_ort.export.inputs import DynamicAxes
from lightning_ort.lightning_packages import everywhere
from lightning_ort.ondevice.generation.built import with_loss
from lightning_ort.ondevice.generation.inputs import Example, arguments_of, example_of, infos_of
from lightning_ort.ondevice.generation.objectives import (
    Inference,
    Loss,
    LossOf,
    Objective,
    StepLoss,
    is_block,
    loss_function,
    target_name,
)
from lightning_ort.ondevice.onnxblock.model_accessor import without_values
from lightning_ort.onnx_reader import to_torch
from lightning_ort.onnx_reader.initializers import state_initializers, trainable_initializers
from lightning_ort.onnx_reader.load import load, name_of, parsed, using

__all__ = ["Source", "onnx_source", "torch_source", "without_side_effects"]


@dataclasses.dataclass
class Source:
    """What is trained.

    Attributes:
        objective: loss and results.
        infos: the inputs of ``objective``.
        inference: the results alone; ``None`` if the model gives none without targets.
        inference_infos: the inputs of ``inference``.
        example: inputs of ``objective``, where the user gave some.
        results: names of the results that ``inference`` gives, where ``objective`` gives others as well.
        returned: further names that an onnxblock returned after the loss.
    """

    objective: Objective
    infos: list[InputInfo]
    inference: Inference | None
    inference_infos: list[InputInfo]
    example: dict[str, Tensor] | None
    results: Sequence[str] | None = None
    returned: Sequence[str] = ()


def torch_source(
    model: nn.Module,
    inputs: Any,
    loss: Any,
    axes: DynamicAxes | None,
    output_names: Sequence[str] | None,
    loss_inputs: Sequence[str] | None,
) -> Source:
    """Of a torch module.

    Raises:
        ValueError: ``inputs`` do not fit ``forward`` and the loss.
    """
    if inputs is None:
        raise ValueError("inputs is missing: a module needs an example of what a training step gets.")
    loss_fn = loss_function(loss)
    copied = without_side_effects(model)
    arguments, required = arguments_of(copied)
    target = target_name(loss_fn)
    if isinstance(model, everywhere("core.module:LightningModule")) and loss_fn is None:
        return _lightning_source(copied, inputs, axes, output_names, arguments[:required])
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if isinstance(inputs, Mapping):
        example = example_of(inputs, [])
        mine = [n for n in example.tensors if n in arguments]
        if not mine:
            raise ValueError(
                f"inputs has {', '.join(example.tensors)}, but forward takes {', '.join(arguments)}: call the "
                "inputs of the model as it calls them."
            )
        keywords: list[str | None] = list(mine)
    else:
        count = len(inputs) - (loss_fn is not None)
        count = min(count, len(arguments)) if required <= count else required
        example = example_of(tuple(inputs), [*arguments[:count], target])
        mine, keywords = list(example.tensors)[:count], [None] * count
    targets = [n for n in example.tensors if n not in mine]
    if loss_fn is None and targets:
        raise ValueError(
            f"inputs has {', '.join(targets)}, which forward does not take, and there is no loss for them."
        )
    if loss_fn is not None and not targets:
        raise ValueError("inputs holds no target for the loss; give it after the inputs of the model.")
    tensors = {n: example.tensors[n] for n in [*mine, *targets]}
    infos = infos_of(tensors, axes)
    inference = Inference(copied, keywords, output_names)
    objective = LossOf(inference, loss_fn, loss_inputs)
    # a model that returns its loss may do so only where it is given targets
    return Source(objective, infos, inference if loss_fn is not None else None, infos[: len(mine)], tensors)


def _lightning_source(
    copied: nn.Module,
    inputs: Any,
    axes: DynamicAxes | None,
    output_names: Sequence[str] | None,
    arguments: Sequence[str],
) -> Source:
    """Of ``training_step``; the results are those of ``forward`` for the first tensors of the batch."""
    example: Example = example_of(inputs, [*arguments, "target"])
    infos = infos_of(example.tensors, axes)
    by_name = {i.name: i for i in infos}
    mine = list(arguments) if all(a in by_name for a in arguments) else list(by_name)[: len(arguments)]
    objective = StepLoss(copied, example.batch)
    overridden = all(type(copied).forward is not kind.forward for kind in everywhere("core.module:LightningModule"))
    inference = Inference(copied, [None] * len(mine), output_names) if overridden and mine else None
    return Source(objective, infos, inference, [by_name[n] for n in mine], example.tensors)


def onnx_source(
    model: Any,
    inputs: Any,
    loss: Any,
    parameters: Sequence[str] | None,
    loss_inputs: Sequence[str] | None,
    additional: Sequence[str] = (),
    frozen: Sequence[str] = (),
) -> Source:
    """Of an ONNX model.

    Args:
        parameters: initializers that become parameters; by default those that a gradient can reach.
        additional: results that are given besides the loss.
        frozen: names of parameters that are not trained.

    Raises:
        ValueError: it has no output that the loss could be computed from.
    """
    if is_block(loss):
        return _block_source(parsed(model), inputs, loss, parameters, loss_inputs, additional, frozen)
    # a classifier looks its labels up by operators that cannot be read: they are left out where scores are asked for
    proto = load(model, {*loss_inputs, *additional} if loss_inputs else None)
    if parameters is not None:
        state = state_initializers(proto)  # the training wheel wants running statistics listed
        parameters = [n for n in parameters if n not in state]
    with using(name_of(model)):
        module = to_torch(proto, parameters, frozen=frozen)
        infos = input_infos(proto)
    inference = Inference(module, [None] * len(infos), module.output_names)
    loss_fn = loss_function(loss)
    objective = LossOf(inference, loss_fn, loss_inputs or (module.output_names if loss_fn is not None else None))
    all_infos = list(infos)
    if loss_fn is not None:
        name = target_name(loss_fn)
        if any(name == info.name for info in infos):
            raise ValueError(
                f"The model has an input {name!r}, which is what the targets of the loss are called; give that input "
                "another name."
            )
        source = loss_inputs[0] if loss_inputs else module.output_names[0]
        all_infos.append(_target(proto, name, source, loss_fn))
    example = _example(inputs, all_infos)
    return Source(objective, all_infos, inference if loss_fn is not None else None, infos, example)


def _block_source(
    forward: onnx.ModelProto,
    inputs: Any,
    block: Any,
    parameters: Sequence[str] | None,
    loss_inputs: Sequence[str] | None,
    additional: Sequence[str],
    frozen: Sequence[str],
) -> Source:
    """Of a model with the loss of an onnxblock."""
    built, losses, made = with_loss(forward, block, loss_inputs, additional)
    proto = load(built, [*losses, *additional])
    if parameters is None:
        # the numbers in a loss are no parameters
        own = {i.name for i in forward.graph.initializer} | set(made)
        parameters = [n for n in trainable_initializers(proto, frozen) if n in own]
    state = state_initializers(proto)
    module = to_torch(proto, [n for n in parameters if n not in state])
    infos = input_infos(proto)
    inference = Inference(module, [None] * len(infos), module.output_names)
    own_inputs = {i.name for i in forward.graph.input}
    return Source(
        LossOf(inference, None),
        infos,
        inference,
        [i for i in infos if i.name in own_inputs],
        _example(inputs, infos),
        [o.name for o in forward.graph.output if o.name != losses[0]],
        losses[1:],
    )


def _example(inputs: Any, infos: Sequence[InputInfo]) -> dict[str, Tensor] | None:
    if inputs is None:
        return None
    given = example_of(inputs, [i.name for i in infos]).tensors
    missing = [i.name for i in infos if i.name not in given]
    if missing:
        raise ValueError(f"inputs lacks {', '.join(missing)}.")
    return {i.name: given[i.name] for i in infos}


def _target(proto: onnx.ModelProto, name: str, source: str, loss_fn: Loss) -> InputInfo:
    """Shaped like the result that it is compared with; classes lack its last but batch dimension."""
    (output,) = (o for o in proto.graph.output if o.name == source)
    if not output.type.tensor_type.HasField("shape"):
        inferred = onnx.shape_inference.infer_shapes(without_values(proto))
        (output,) = (o for o in inferred.graph.output if o.name == source)
    info = dataclasses.replace(info_of(output, "output"), name=name)
    if isinstance(loss_fn, nn.CrossEntropyLoss):
        if len(info.shape) < 2:
            raise ValueError(
                f"CrossEntropyLoss: {source!r} has shape {list(info.shape)}; expected (batch, classes, ...)."
            )
        return InputInfo(name, torch.int64, (info.shape[0], *info.shape[2:]))
    return info


def without_side_effects(module: nn.Module) -> nn.Module:
    """A copy whose counters and lists are its own, which logs nothing and whose metrics compute nothing.

    A metric gives NaN, so that a loss that depends on one is found out when the graphs are checked.

    Raises:
        ValueError: the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        memo[id(tensor)] = tensor
    for part in module.modules():
        if isinstance(part, everywhere("core.module:LightningModule")):
            for owner in (part._trainer, part._fabric):
                if owner is not None:
                    memo[id(owner)] = None
    try:
        found = copy.deepcopy(module, memo)
    except Exception as error:
        raise ValueError(
            f"{type(module).__name__} cannot be copied ({error}), so that its steps cannot be traced without changing "
            "it. Give the network that it holds, and a loss function."
        ) from error
    for part in found.modules():
        if isinstance(part, everywhere("core.module:LightningModule")):
            part.__dict__.update(log=_nothing, log_dict=_nothing)
        if isinstance(part, Metric):
            part.__dict__.update(forward=_not_a_number, compute=_not_a_number, update=_nothing)
    return found


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _not_a_number(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.tensor(torch.nan)
