"""Artifacts for training on a device."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_ort.checkpoints.state import OptimizerState, TrainingState
from lightning_ort.compiler.aot.inputs import InputInfo
from lightning_ort.compiler.aot.sizes import mismatch
from lightning_ort.compiler.aot.step_graph import StepGraph
from lightning_ort.errors import UnsupportedError
from lightning_ort.export.inputs import DynamicAxes
from lightning_ort.lightning_packages import everywhere
from lightning_ort.ondevice.exchange_optimizers import optimizer_of_torch
from lightning_ort.ondevice.formats import Artifacts, flavour_named
from lightning_ort.ondevice.generation.built import optimizer_of_block
from lightning_ort.ondevice.generation.checking import check_artifacts
from lightning_ort.ondevice.generation.objectives import LossOf, LossType, ModuleForward, is_block
from lightning_ort.ondevice.generation.sources import Source, onnx_source, torch_source
from lightning_ort.ondevice.generation.step_graphs import evaluation_graph, part_of, training_graph
from lightning_ort.ondevice.optimizer_config import OptimizerConfig, OptimType, config_of, config_of_kind
from lightning_ort.validation import flag, names, number, shown

__all__ = ["LossType", "OptimType", "generate_artifacts"]  # the names of onnxruntime.training.artifacts


def generate_artifacts(
    model: Any,
    artifact_directory: str | os.PathLike[str] | None = None,
    *,
    inputs: Any = None,
    loss: str | Callable[..., torch.Tensor] | None = None,
    optimizer: OptimizerConfig | torch.optim.Optimizer | str | None = "AdamW",
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    clip_grad_norm: float | None = None,
    flavour: str = "portable",
    prefix: str = "",
    dynamic_axes: DynamicAxes | None = None,
    output_names: Sequence[str] | None = None,
    additional_output_names: Sequence[str] | None = None,
    loss_input_names: Sequence[str] | None = None,
    nominal_checkpoint: bool = False,
    ort_format: bool = False,
    custom_op_library: str | os.PathLike[str] | None = None,
    verify: bool = True,
) -> Artifacts:
    """Write the files with which a model is trained on a device.

    Args:
        model: a module, a LightningModule, or a forward ONNX model (``onnx.ModelProto``, bytes or a path, opset 13 to
            21). It is not changed.
        artifact_directory: where the files go; made if it does not exist. By default the current folder.
        inputs: an example of what a training step gets: for a module the inputs of ``forward`` and the targets, in
            order or by name; for a LightningModule without ``loss`` the batch of ``training_step``. An ONNX model needs
            none; with an example its graphs are checked.
        loss: ``"MSELoss"``, ``"CrossEntropyLoss"``, ``"BCEWithLogitsLoss"``, ``"L1Loss"`` (or a member of ONNX
            Runtime's ``LossType``), or a function from the results of the model and the targets to a scalar tensor; for
            an ONNX model also an ``onnxblock``, this package's or ONNX Runtime's. ``None``: the first result of the
            model is the loss, or ``training_step`` of a LightningModule returns it.
        optimizer: an :class:`~lightning_ort.ondevice.OptimizerConfig`, a kind (``"AdamW"``, ``"Adam"``, ``"SGD"``,
            ``"Lamb"``), a member of an ``OptimType``, ONNX Runtime's or this package's, with the settings that it has
            there, a torch optimizer of the module (AdamW, Adam, SGD, or one of ``lightning_ort.optim``), whose moments
            and number of updates are taken over, an ``onnxblock`` such as ``onnxblock.optim.AdamW()``, or ``None`` for
            no update. Where no parameter is trained, the default writes no optimizer.
        requires_grad: names of the parameters that are trained; by default all that require a gradient, or that a
            torch optimizer holds. One that does not lead to the loss stays as it is, as in torch. A tensor of several
            names has any of them here, and its first in the files.
        frozen_params: names of parameters that are not trained.
        clip_grad_norm: shorthand for that attribute of ``optimizer``.
        flavour: the format of the files: ``"portable"`` or ``"ort-training"``.
        prefix: put before the names of all files.
        dynamic_axes: which sizes vary, by input: dimensions with the names of their sizes, ``{"x": {0: "batch"}}``, or
            a list of dimensions, as in ``torch.onnx.export``; by default the first of each input, ``batch``.
        output_names: of the results of a module.
        additional_output_names: results that the training and evaluation steps give besides the loss; without a loss
            function all are given.
        loss_input_names: results that the loss function gets, by default what the model returns. Of an ONNX model,
            others that need operators which cannot be read (the labels of a classifier) are then left out.
        nominal_checkpoint: write a further checkpoint, ``nominal_checkpoint``, with names but without the values of
            parameters and without moments. A device that has it gets the values from elsewhere, by
            ``Module.copy_buffer_to_parameters(buffer, trainable_only=False)``.
        ort_format: refused if set; the error names the command that converts the files.
        custom_op_library: refused if set: operators of a library cannot be differentiated.
        verify: compare loss, gradients and buffers of the example with torch's before anything is written.

    Returns:
        What was written.

    Raises:
        ValueError, TypeError, FileNotFoundError: something does not fit together, named.
        UnsupportedError: an operation that has no ONNX form, or ``ort_format`` or ``custom_op_library``.
        MismatchError: a graph computes something else than torch.
    """
    if artifact_directory is not None and not isinstance(artifact_directory, (str, os.PathLike)):
        raise TypeError(f"artifact_directory is a {type(artifact_directory).__name__}; expected a path.")
    lists = {
        "requires_grad": requires_grad, "frozen_params": frozen_params, "output_names": output_names,
        "additional_output_names": additional_output_names, "loss_input_names": loss_input_names,
    }  # fmt: skip
    for argument, given in lists.items():
        if given is not None:
            names(argument, given)
    flag("nominal_checkpoint", nominal_checkpoint)
    flag("ort_format", ort_format)
    flag("verify", verify)
    if not isinstance(prefix, str):
        raise TypeError(f"prefix={shown(prefix)}: expected a string.")
    if clip_grad_norm is not None:
        clip_grad_norm = number("clip_grad_norm", clip_grad_norm, above=0)
    chosen = flavour_named(flavour)
    _refuse(ort_format, custom_op_library)
    config = None if is_block(optimizer) else _optimizer(optimizer, clip_grad_norm)
    if is_block(optimizer) and clip_grad_norm is not None:
        raise ValueError("clip_grad_norm was given with an onnxblock as optimizer; give the block clip_grad instead.")
    source = _source(
        model, inputs, loss, dynamic_axes, output_names, loss_input_names, additional_output_names,
        None if requires_grad is None else [*requires_grad, *(frozen_params or ())], frozen_params or (),
    )  # fmt: skip
    torch_optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    choose = _trained(requires_grad, frozen_params, torch_optimizer)
    wanted = optimizer if is_block(optimizer) else config
    artifacts, random = _artifacts(source, choose, wanted, asked=is_block(optimizer) or optimizer != "AdamW")
    if torch_optimizer is not None and config is not None:
        parameters = {n: p for n, p in _named_parameters(source).items() if n in artifacts.state.trained}
        state = optimizer_of_torch(artifacts.state, torch_optimizer, parameters)
        artifacts.state.optimizer = dataclasses.replace(state, kind=config.kind)
    if verify and source.example is not None:
        check_artifacts(artifacts, source, source.example, random=random)
    directory = Path(artifact_directory or ".")
    directory.mkdir(parents=True, exist_ok=True)
    chosen.write(artifacts, directory, prefix, nominal_checkpoint=nominal_checkpoint)
    return artifacts


def _source(
    model: Any,
    inputs: Any,
    loss: Any,
    dynamic_axes: DynamicAxes | None,
    output_names: Sequence[str] | None,
    loss_input_names: Sequence[str] | None,
    additional: Sequence[str] | None,
    parameters: Sequence[str] | None,
    frozen: Sequence[str],
) -> Source:
    """The model with its loss; ``parameters`` are names that were given, ``frozen`` those of what is not trained."""
    if isinstance(model, nn.Module):
        source = torch_source(model, inputs, loss, dynamic_axes, output_names, loss_input_names)
    else:
        if dynamic_axes is not None or output_names is not None:
            raise ValueError("dynamic_axes and output_names are for modules; an ONNX model says both itself.")
        source = onnx_source(model, inputs, loss, parameters, loss_input_names, additional or (), frozen)
    is_lightning = isinstance(model, everywhere("core.module:LightningModule"))
    if additional is not None or loss is not None or is_lightning:
        source.objective.additional = [*source.returned, *(additional or ())]
    return source


def _refuse(ort_format: bool, library: Any) -> None:
    if ort_format:
        raise UnsupportedError(
            "ort_format=True: a file in ORT format suits one kind of processor, which is not known here. Leave it out "
            "and convert the files: python -m onnxruntime.tools.convert_onnx_models_to_ort <artifact_directory> "
            "--optimization_style Fixed --target_platform arm (or amd64)."
        )
    if library is not None:
        raise UnsupportedError(
            f"custom_op_library={shown(library)}: operators of a library cannot be differentiated. Leave it out, "
            "and write the model in standard operators."
        )


def _optimizer(optimizer: Any, clip: float | None) -> OptimizerConfig | None:
    if isinstance(optimizer, torch.optim.Optimizer):
        return config_of(optimizer, clip_grad_norm=clip)
    if optimizer is None:
        if clip is not None:
            raise ValueError("clip_grad_norm was given without an optimizer.")
        return None
    config = optimizer if isinstance(optimizer, OptimizerConfig) else config_of_kind(optimizer)
    return config if clip is None else dataclasses.replace(config, clip_grad_norm=clip)


def _named_parameters(source: Source) -> dict[str, nn.Parameter]:
    """The user's own, which the copy that is traced shares, by their names."""
    return {n.removeprefix("model."): p for n, p in source.objective.named_parameters()}


def _trained(
    requires_grad: Sequence[str] | None, frozen: Sequence[str] | None, optimizer: torch.optim.Optimizer | None
) -> Callable[[ModuleForward], list[str]]:
    def choose(forward: ModuleForward) -> list[str]:
        known = list(forward.parameters)
        first = forward.first_names
        for argument, listed_names in (("requires_grad", requires_grad), ("frozen_params", frozen)):
            unknown = [n for n in listed_names or () if n not in first]
            if unknown:
                listed = ", ".join(map(repr, unknown))
                raise ValueError(f"{argument}: the model has no parameter {listed}. It has: {', '.join(known)}.")
        buffers = [n for n in requires_grad or () if first[n] in forward.buffers]
        if buffers:
            raise ValueError(
                f"requires_grad: {', '.join(map(repr, buffers))} is a buffer, which no gradient trains. Expected some "
                f"of the parameters: {', '.join(known)}."
            )
        never = {first[n] for n in frozen or ()}
        both = [n for n in requires_grad or () if first[n] in never]
        if both:
            others = sorted({n for n in frozen or () if first[n] in {first[b] for b in both}} - set(both))
            same = f", where {others} name the same" if others else ""
            raise ValueError(f"{sorted(both)} are both in requires_grad and in frozen_params{same}.")
        wanted = forward.requiring_grad if requires_grad is None else [first[n] for n in requires_grad]
        if requires_grad is None and optimizer is not None:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            own = {n.removeprefix("model."): p for n, p in forward.objective.named_parameters()}
            if wanted and not held & {id(p) for p in own.values()}:
                raise ValueError(
                    f"optimizer: its {len(held)} parameters are not those of the model, perhaps those of a copy of it. "
                    "Expected an optimizer of model.parameters()."
                )
            wanted = [n for n in wanted if id(own.get(n)) in held]
        return [n for n in known if n in wanted and n not in never]

    return choose


def _evaluations(
    source: Source, forward: ModuleForward, wanted: Sequence[str], changing: Sequence[str]
) -> tuple[StepGraph, StepGraph | None]:
    """The graphs of evaluation and inference; one trace serves both where the loss is computed from the results."""
    if source.inference is None:
        return evaluation_graph(forward, changing), None
    if not isinstance(source.objective, LossOf):
        evaluation = evaluation_graph(forward, changing)
        inference = ModuleForward(source.inference, _those(forward, source.inference_infos), source.example)
        return evaluation, evaluation_graph(inference, changing)
    additional, source.objective.additional = source.objective.additional, None
    try:
        everything = evaluation_graph(forward, changing)
    finally:
        source.objective.additional = additional
    first, *results = everything.outputs
    assert first == wanted[0]
    if source.results is not None:
        results = [name for name in results if name in source.results]
    inputs = _those(forward, source.inference_infos)
    return part_of(everything, wanted, forward.infos), part_of(everything, results, inputs)


def _those(forward: ModuleForward, infos: Sequence[InputInfo]) -> list[InputInfo]:
    """The inputs of ``forward`` that are called as ``infos``."""
    by_name = {i.name: i for i in forward.infos}
    return [by_name[i.name] for i in infos]


def _artifacts(
    source: Source, choose: Callable[[ModuleForward], list[str]], optimizer: Any, *, asked: bool
) -> tuple[Artifacts, bool]:
    """What is to be written, and whether the training step draws random numbers.

    Args:
        optimizer: an :class:`OptimizerConfig`, an onnxblock, or ``None``.
        asked: whether the user has asked for an optimizer, which is an error where nothing is trained.
    """
    forward = ModuleForward(source.objective, source.infos, source.example)
    train, changing, random = training_graph(forward, choose(forward))
    trained = list(train.gradients)
    if not trained and optimizer is not None:
        if asked:
            raise ValueError(
                "No parameter is trained: requires_grad and frozen_params leave none that leads to the loss. With "
                "optimizer=None there are artifacts all the same, which give losses and running statistics."
            )
        optimizer = None
    if source.example is not None:
        wrong = mismatch(forward.infos, [source.example[i.name].shape for i in forward.infos])
        if wrong is not None:
            given = ", ".join(f"{i.name} {tuple(source.example[i.name].shape)}" for i in forward.infos)
            raise ValueError(
                f"inputs: {wrong} Their shapes are {given}; that is expected because of the others and of the model: "
                "correct the one that does not fit."
            )
    evaluation, inference = _evaluations(source, forward, train.outputs, changing)
    state = TrainingState(
        {n: p.detach().cpu().clone() for n, p in forward.parameters.items()},
        tuple(trained),
        {n: forward.buffers[n].detach().cpu().clone() for n in changing},
    )
    config = optimizer_of_block(optimizer, state.parameters, trained) if is_block(optimizer) else optimizer
    if config is not None:
        state.optimizer = OptimizerState.fresh(config, {n: state.parameters[n] for n in trained})
    return Artifacts(state, train, evaluation, inference, config), random
