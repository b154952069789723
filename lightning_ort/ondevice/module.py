"""Forward and backward passes of a training on a device."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor

from lightning_ort.compiler.aot.step_graph import StepGraph
from lightning_ort.compiler.aot.step_runner import StepRunner
from lightning_ort.compiler.passes.cleanup import RemoveUnusedInputsPass
from lightning_ort.errors import CheckpointError
from lightning_ort.files.onnx_models import save_onnx
from lightning_ort.files.reading import refusing
from lightning_ort.ondevice.checkpoint import CheckpointState, checked, given_back
from lightning_ort.ondevice.formats import flavour_of_model
from lightning_ort.ondevice.memory import TrainingMemory
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.runtime.factory import SessionFactory
from lightning_ort.runtime.tensors import cpu_tensor, owning
from lightning_ort.validation import flag, names, path, shown

__all__ = ["Module"]

Path_ = str | os.PathLike[str]


class Module:
    """Runs the training and the evaluation step of artifacts.

    The interface is that of ``onnxruntime.training.api.Module``.

    Args:
        train_model_uri: the training graph.
        state: parameters; they live in the memory of this module from now on, and ``state`` shows them. Modules of one
            state share parameters, gradients and running statistics.
        eval_model_uri: the evaluation graph, if evaluations are wanted.
        device: ``"cpu"``.
        session_options: an ``onnxruntime.SessionOptions``, or a mapping of its attributes.

    Raises:
        FileNotFoundError, ValueError: no such artifact, or one that does not fit ``state``.

    Attributes:
        training: whether a call is a training step.
    """

    training: bool

    def __init__(
        self,
        train_model_uri: Path_,
        state: CheckpointState,
        eval_model_uri: Path_ | None = None,
        device: str = "cpu",
        session_options: Any = None,
    ) -> None:
        if not isinstance(state, CheckpointState):
            raise TypeError(f"state is a {type(state).__name__}; expected a CheckpointState.")
        if not isinstance(device, str) or device.split(":")[0] != "cpu":
            raise ValueError(f"device={shown(device)}: expected 'cpu'; training on a device runs on the CPU only.")
        config = RuntimeConfig(session_options=session_options)
        config.check()
        values = state.training_state
        train_path = Path(path("train_model_uri", train_model_uri))
        memory = state.memory
        with _using(train_path):
            graph = flavour_of_model(train_path).load_train_step(train_path, values)
        if memory is not None:
            memory.show_in(values)  # a nominal state was given zeros
        evaluation = None
        if eval_model_uri is not None:
            eval_path = Path(path("eval_model_uri", eval_model_uri))
            with _using(eval_path):
                evaluation = flavour_of_model(eval_path).load_eval_step(eval_path, values)
        self.sessions, self.memory = SessionFactory(config), memory or TrainingMemory(values)
        tensors = self.memory.tensors
        gradients = {n: self.memory.gradients.views[n] for n in graph.gradients}
        with _using(train_path):
            self._train = StepRunner(graph, tensors, gradients, self.sessions)
        self._eval = None
        if evaluation is not None:
            with _using(Path(eval_model_uri or "")):
                self._eval = StepRunner(evaluation, tensors, {}, self.sessions)
        # nothing can fail any more
        self.memory.show_in(values)
        state.memory = self.memory
        self._tensors, self.state, self.training = tensors, state, True

    def __call__(self, *user_inputs: Any) -> Any:
        """One training step, which adds to the gradients and changes running statistics; or one evaluation.

        Args:
            user_inputs: numpy arrays, OrtValues or torch tensors, in the order of :meth:`input_names`.

        Returns:
            The loss, or a tuple of all outputs: OrtValues if all inputs are, torch tensors if all inputs are, else
            numpy arrays; in memory of their own.

        Raises:
            ValueError, TypeError: the inputs do not fit; nothing has been changed then.
            RuntimeError: an evaluation without an evaluation graph.
            RefusedValueError: an operator does not take these values. Parameters and running statistics have not been
                changed, nor gradients to which these were to be added; others are gone.
        """
        training, memory = self.training, self.memory
        step = self._train if training else self._step()
        if not (training and memory.accumulates):
            # Python takes as long as ONNX Runtime for a network of a thousand parameters, hence this way around it
            try:
                again = step.again(user_inputs)
            except BaseException:
                self._failed(training)
                raise
            if again is not None:
                memory.accumulates = memory.accumulates or training
                return again
        self.require_values()
        inputs = checked(user_inputs, step.graph.inputs)
        results = self._accumulated(inputs) if training else step(inputs)
        return given_back(results, user_inputs)

    def _step(self) -> StepRunner:
        if self.training:
            return self._train
        if self._eval is None:
            raise RuntimeError("The module has no evaluation graph: give eval_model_uri.")
        return self._eval

    def _accumulated(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        memory = self.memory
        if not memory.accumulates:
            try:
                results = self._train(inputs)
            except BaseException:
                self._failed(training=True)
                raise
        else:
            memory.keep_gradients()
            try:
                results = self._train(inputs)
            except BaseException:
                memory.restore_kept()
                raise
            memory.add_kept()
        self._computed()
        return results

    def _failed(self, training: bool) -> None:
        """A step did that would have replaced the gradients: what is there are neither the old nor the new ones."""
        if training:
            self.state.gradients = None

    def _computed(self) -> None:
        """There are gradients now."""
        self.memory.accumulates = True
        self.state.gradients = self.memory.gradients.views

    def train(self, mode: bool = True) -> Module:
        """Let calls be training steps (or evaluations, with ``mode=False``); ``self``."""
        self.training = flag("mode", mode)
        return self

    def eval(self) -> Module:
        """Let calls be evaluations; ``self``."""
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """Let the next training step replace the gradients instead of adding to them."""
        self.memory.accumulates = False

    def require_values(self) -> None:
        """Raise a RuntimeError while the parameters have no values (a nominal checkpoint)."""
        if self.state.training_state.nominal:
            raise RuntimeError(
                "The parameters have no values yet: the checkpoint is a nominal one, which holds their names. Please "
                "load the model parameters first. copy_buffer_to_parameters(buffer, trainable_only=False) does it."
            )

    def _chosen(self, trainable_only: bool) -> list[str]:
        """Names in the order of ONNX Runtime's API, which is that of the training graph: parameters, then buffers."""
        values = self.state.training_state
        names = self._train.graph.order or values.tensors
        return [n for n in names if n in values.trained or not trainable_only]

    def _in_order(self, trainable_only: bool) -> list[Tensor]:
        """The chosen tensors. Buffers that count are among floats, so ``_one_type`` does not look at them."""
        names, buffers = self._chosen(trainable_only), self.state.training_state.buffers
        tensors = [self._tensors[n] for n in names]
        _one_type([t for n, t in zip(names, tensors, strict=True) if n not in buffers or t.is_floating_point()])
        return tensors

    def get_contiguous_parameters(self, trainable_only: bool = False) -> onnxruntime.OrtValue:
        """A copy of the parameters, one after the other in the order of the model, as a vector of their element type.

        Running statistics and their counters, which a training step changes and an evaluation may read, are among the
        parameters that are not trained, as ONNX Runtime has them. A counter is rounded to the element type.

        Args:
            trainable_only: leave out those that are not trained.

        Raises:
            ValueError: they are not of one element type.
            RuntimeError: they have no values yet (a nominal checkpoint).
        """
        self.require_values()
        tensors = self._in_order(trainable_only)
        dtype = tensors[0].dtype
        largest = torch.finfo(dtype).max
        floats = [t if t.is_floating_point() else t.double().clamp(max=largest) for t in tensors]
        return owning(torch.cat([t.to(dtype).reshape(-1) for t in floats]).numpy())

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """Number of elements of :meth:`get_contiguous_parameters`, by default of what is trained."""
        return sum(self._tensors[n].numel() for n in self._chosen(trainable_only))

    def copy_buffer_to_parameters(self, buffer: Any, trainable_only: bool = True) -> None:
        """Replace the parameters by what :meth:`get_contiguous_parameters` gave, possibly of another device.

        Args:
            buffer: a vector (OrtValue, numpy array or tensor) of as many elements, in the same order.
            trainable_only: as it was for :meth:`get_contiguous_parameters`, whose default is another.

        Raises:
            ValueError: another number of elements or another element type; nothing has been changed then.
        """
        flat = cpu_tensor(buffer, "buffer").reshape(-1)
        targets = self._in_order(trainable_only)
        if trainable_only and self.state.training_state.nominal:
            raise ValueError("A nominal checkpoint has no values at all; give them with trainable_only=False.")
        size = sum(t.numel() for t in targets)
        if flat.numel() != size or flat.dtype != targets[0].dtype:
            raise ValueError(
                f"buffer holds {flat.numel()} elements of {flat.dtype}; {self._counted(trainable_only)} are {size} of "
                f"{targets[0].dtype}. Give what get_contiguous_parameters(trainable_only={trainable_only}) of a module "
                "of the same artifacts returns."
            )
        for target, part in zip(targets, flat.split([t.numel() for t in targets]), strict=True):
            target.copy_(part.view(target.shape))
        self.state.training_state.nominal = False

    def _counted(self, trainable_only: bool) -> str:
        """What a buffer holds, in words."""
        buffers = {} if trainable_only else self.state.training_state.buffers
        if not buffers:
            return "the parameters"
        without = sum(t.numel() for t in self.state.training_state.parameters.values())
        return f"the parameters, which are {without}, and the running statistics together"

    def export_model_for_inferencing(self, inference_model_uri: Path_, graph_output_names: Sequence[str]) -> None:
        """Write the part of the evaluation graph that computes some of its values, with the present parameters.

        Args:
            inference_model_uri: the file; more than 2 GB of weights go to ``<stem>.<number>.data`` beside it.
            graph_output_names: values of the evaluation graph, outputs or not; inputs that none of them needs are
                left out.

        Raises:
            TypeError: ``graph_output_names`` is no list of names.
            ValueError: the graph has no such value.
            RuntimeError: the module has no evaluation graph.
        """
        wanted = names("graph_output_names", graph_output_names)
        if self._eval is None:
            raise RuntimeError("The module has no evaluation graph: give eval_model_uri.")
        _save_inference_model(self._eval.graph, self._tensors, Path(inference_model_uri), wanted)

    def input_names(self) -> list[str]:
        """Names of the inputs of a call in the present mode."""
        return [i.name for i in self._step().graph.inputs]

    def output_names(self) -> list[str]:
        """Names of the outputs of a call in the present mode."""
        return list(self._step().graph.outputs)


def _using(path: Path) -> contextlib.AbstractContextManager[None]:
    return refusing(path, "not to be used", kind=CheckpointError)


def _one_type(tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise ValueError("There are no such parameters: the checkpoint has none, or none that is trained.")
    found = sorted({str(t.dtype) for t in tensors})
    if len(found) != 1:
        raise ValueError(f"The parameters are of {len(found)} element types ({', '.join(found)}); expected one.")


def _save_inference_model(graph: StepGraph, tensors: Mapping[str, Tensor], path: Path, outputs: Sequence[str]) -> None:
    """Write a model from the inputs of ``graph`` that are needed to its values ``outputs``.

    Raises:
        ValueError: the graph has no such value, or none is asked for.
    """
    model = graph.model.clone()
    values = {str(v.name): v for node in model.graph for v in node.outputs}
    unknown = [n for n in outputs if n not in values]
    if unknown or not outputs:
        given = ", ".join(str(v.name) for v in model.graph.outputs)
        near = ", ".join(dict.fromkeys(n for u in unknown for n in difflib.get_close_matches(u, values, 2)))
        raise ValueError(
            f"The graph has no value {', '.join(map(repr, unknown)) or 'to be exported'}. It gives: {given}; inside of "
            "it are the results of the forward model, which are called 'output' where a torch module returns one"
            f"{', and among others ' + near if near else ''}."
        )
    model.graph.outputs.clear()
    model.graph.outputs.extend(values[n] for n in outputs)
    for value in list(model.graph.inputs):
        name = graph.tensors.get(str(value.name))
        if name is not None:
            model.graph.inputs.remove(value)
            value.const_value = ir.tensor(tensors[name].detach().cpu().contiguous(), name=value.name)
            model.graph.register_initializer(value)
    RemoveUnusedNodesPass()(model)
    RemoveUnusedInputsPass()(model)
    save_onnx(model, path)
