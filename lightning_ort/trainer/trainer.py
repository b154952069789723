"""Training of a PyTorch module in ONNX Runtime, by the interface of ``onnxruntime.training.ORTTrainer``."""

from __future__ import annotations

import functools
import operator
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_ort.amp import DynamicLossScaler, LossScaler
from lightning_ort.compiler.aot.inputs import input_type
from lightning_ort.compiler.reference import Buffers
from lightning_ort.environment import require_onnxruntime
from lightning_ort.export.checking import check_sample
from lightning_ort.onnx_reader import to_torch
from lightning_ort.optim.config import _OptimizerConfig
from lightning_ort.optim.step_info import TrainStepInfo
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.runtime.factory import SessionFactory
from lightning_ort.trainer.debug import GraphFiles
from lightning_ort.trainer.description import Description, describe
from lightning_ort.trainer.device import choose_device, join_processes, runtime_config
from lightning_ort.trainer.export import check_export, export, results_of, save
from lightning_ort.trainer.optimizer import Optimizer, check_groups
from lightning_ort.trainer.options import ORTTrainerOptions, check_arguments, refuse
from lightning_ort.trainer.state import TrainerState, settings_of, weights_of
from lightning_ort.trainer.step import CombinedModule, Execution
from lightning_ort.validation import listed, number

__all__ = ["ORTTrainer", "example_inputs", "make_module"]


class ORTTrainer(TrainerState):
    """Trains ``model``: forward pass, gradients and updates run in ONNX Runtime, on the memory of the module.

    The interface is that of ``onnxruntime.training.ORTTrainer`` as ONNX Runtime 1.16 shipped it; ``docs/orttrainer.md``
    lists what differs.

    Args:
        model: an ``nn.Module``, whose weights are trained in place, or an ``onnx.ModelProto``.
        model_desc: ``{"inputs": [(name, shape)], "outputs": [(name, shape, is_loss)]}``. A size is a number, or a
            name if it may change. The names of inputs are those of ``forward``'s arguments; outputs have the order in
            which the model returns them, after the loss if there is a ``loss_fn``. For an ONNX model, all names and
            their order are the model's.
        optim_config: ``optim.AdamConfig``, ``optim.LambConfig`` or ``optim.SGDConfig``.
        loss_fn: function of what the model returns and the label, which is the input that ``forward`` does not take,
            to a scalar tensor. It has exactly two parameters: ``nn.CrossEntropyLoss()``, not
            ``nn.functional.cross_entropy``. Without it, one of the outputs is the loss.
        options: everything else; the defaults train on a CUDA device if there is one, else on the CPU.

    Raises:
        AssertionError: an argument of another kind.
        ValueError: ``model_desc`` or an option is not as described, or ``distributed`` not as the process group.
        NotImplementedError: an option that is not supported.
        RuntimeError: ``frozen_weights`` names weights that the model does not have.
        OnnxRuntimeImportError: ONNX Runtime is not installed, or cannot be used.

    Attributes:
        model_desc: the description, converted.
        optim_config: as it was given; ``optim_config.lr`` may be changed between steps.
        options: as they were given.
    """

    def __init__(
        self,
        model: nn.Module | onnx.ModelProto,
        model_desc: Mapping[str, Any],
        optim_config: _OptimizerConfig,
        loss_fn: Callable[[Any, Tensor], Tensor] | None = None,
        options: ORTTrainerOptions | None = None,
    ) -> None:
        require_onnxruntime()
        check_arguments(model, optim_config, loss_fn, options)
        self.model_desc, self.optim_config, self.loss_fn = describe(model_desc), optim_config, loss_fn
        self.options = ORTTrainerOptions() if options is None else options
        refuse(self.options)
        mixed = self.options.mixed_precision
        if mixed.loss_scaler is not None and not mixed.enabled:
            raise ValueError("Loss Scaler cannot be specified when Mixed Precision is not enabled")
        self._scaler: LossScaler | None = None
        if mixed.enabled:
            self._scaler = DynamicLossScaler() if mixed.loss_scaler is None else mixed.loss_scaler
        self._scaler_settings = settings_of("options['mixed_precision.loss_scaler']", self._scaler)
        self._device = choose_device(self.options)
        # all that may be refused comes before the first thing that is changed
        RuntimeConfig(session_options=self.options.session_options).check()
        module = make_module(model, self.model_desc, self.options)
        self._from_onnx = isinstance(model, onnx.ModelProto)
        self._made_up = example_inputs(model, self.model_desc) if isinstance(model, onnx.ModelProto) else None
        self._combined = CombinedModule(module, loss_fn, self.model_desc)
        self._weights = self._all_weights(module)
        self._check_names()
        runtime = runtime_config(self.options, self._device)
        runtime.check()
        self._processes = join_processes(self.options, self._device)
        sessions = SessionFactory(runtime, self._device)
        self._combined.to(self._device)
        self._weights = self._all_weights(module)
        self._freeze()
        self._parameters = [*self._combined.parameters()]
        distributed = self.options.distributed
        self._make_optimizer = functools.partial(
            Optimizer,
            optim_config,
            known=self._weights,
            sessions=sessions,
            clip=self.options.utils.grad_norm_clip,
            guard=bool(mixed.enabled),
            processes=self._processes,
            share=bool(distributed.deepspeed_zero_optimization.stage),
        )
        self._optimizer = self._make_optimizer(params=self._trained())
        # gradients of each step, or of those that make one update
        self._combines_each = self._processes is not None and not distributed.allreduce_post_accumulation
        self._files = GraphFiles(self.options)
        self._execution = Execution(
            self._combined,
            self.model_desc,
            self._files.watched(runtime),
            self._device,
            half=torch.float16 if mixed.enabled else None,
        )
        self._train_step_info = TrainStepInfo(optim_config)
        self._accumulated = 0
        self._scale = 1.0
        self._skipped = 0
        self._lightning: dict[str, Any] = {}
        self._replicated, self._loads = self._processes is None, 0

    def _check_parameters(self) -> None:
        """Refuse a module in which somebody has put other parameters: steps would use, and not train them."""
        now = [*self._combined.parameters()]
        if len(now) == len(self._parameters) and all(map(operator.is_, now, self._parameters)):
            return
        known = {*map(id, self._parameters)}
        added = [name for name, p in self._combined.named_parameters() if id(p) not in known]
        names = listed(name.removeprefix("model.") for name in added) if added else "some are missing"
        raise RuntimeError(
            f"The model has other parameters than those this ORTTrainer was made with: {names}. "
            "It would not train or save them: make another ORTTrainer of the model, or change values in place, "
            "with torch.no_grad(): parameter.copy_(...)."
        )

    def _all_weights(self, module: nn.Module) -> dict[str, Tensor]:
        weights = weights_of(module)
        if isinstance(self.loss_fn, nn.Module):
            weights |= {f"loss_fn.{name}": tensor for name, tensor in weights_of(self.loss_fn).items()}
        return weights

    def _check_names(self) -> None:
        """Raise if the options or the optimizer name weights that there are not."""
        unknown = [name for name in self._frozen() if not isinstance(name, str) or name not in self._weights]
        if unknown:
            raise RuntimeError(
                f"{unknown} params from 'frozen_weights' not found in the ONNX model. Its weights are "
                f"{', '.join(self._weights)}."
            )
        check_groups(self.optim_config, self._weights)

    def _frozen(self) -> list[Any]:
        """Names of ``frozen_weights``; that of a tensor which has several is the one under which it is trained."""
        first = {id(tensor): name for name, tensor in self._weights.items()}
        same = {name: first.get(id(t), name) for name, t in self._combined.model.state_dict(keep_vars=True).items()}
        given = self.options.utils.frozen_weights
        return [same.get(n, n) if isinstance(n, str) and n not in self._weights else n for n in given]

    def _freeze(self) -> None:
        """Take the frozen weights out of the gradients."""
        for name in self._frozen():
            weight = self._weights.get(name)
            if isinstance(weight, nn.Parameter):
                weight.requires_grad_(False)

    def _trained(self) -> dict[str, nn.Parameter]:
        """The weights that want gradients."""
        return {n: t for n, t in self._weights.items() if isinstance(t, nn.Parameter) and t.requires_grad}

    @override
    def _take_in_thawed(self) -> None:
        thawed = self._trained().keys() - self._optimizer.names()
        if not thawed or not (thawed := thawed.difference(self._frozen())):
            return
        if self._processes is not None:
            raise RuntimeError(
                f"{listed(sorted(thawed))} had requires_grad=False when this ORTTrainer was made, and want gradients "
                "now. Several processes train what they have agreed on then: make another ORTTrainer of the model, and "
                "give it the state_dict() of this one."
            )
        names = {*self._optimizer.names(), *thawed}
        trained = {n: t for n, t in self._weights.items() if n in names and isinstance(t, nn.Parameter)}
        optimizer = self._make_optimizer(params=trained)
        optimizer.load(self._optimizer.state())
        self._optimizer = optimizer

    # -- steps ----------------------------------------------------------------------------------------------------

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, backward, and an update, or with gradient accumulation an update after the last of several steps.

        Args:
            *args: inputs in the order of ``model_desc``, or one list of them: tensors of the described shapes, on any
                device. The types of the first step are those of all later ones.
            **kwargs: inputs by name.

        Returns:
            All outputs, in the order of ``model_desc``, in a list; a single one as it is. They are those before the
            update, detached, on the device of the trainer; the loss is neither scaled nor divided by the number of
            accumulated steps.

        Raises:
            AssertionError: missing, surplus or unknown inputs; sizes of one name that differ; no loss is described.
            AttributeError: an input is no tensor.
            RuntimeError: an input has another type or shape than described, the model got other parameters, weights of
                several processes want gradients that did not when the trainer was made, or the step cannot be executed;
                the message names them. Nothing has been changed then.
            ValueError: at the first step of several processes, their models, hyper-parameters or options differ.
            RankError: another process has failed or ended.
            MismatchError: the first run of a graph gave other results than torch.
        """
        losses = [output for output in self.model_desc.outputs if output.is_loss]
        if len(losses) != 1:
            raise AssertionError(f"Only one loss output is supported ({len(losses)} were specified)")
        inputs = self._execution.inputs(args, kwargs)
        self._check_parameters()
        picked = self._picked()
        self._take_in_thawed()
        self._replicate()
        info = self._train_step_info
        lr = self._learning_rate()
        if self._accumulated == 0:
            self._optimizer.zero_grad()
            self._scale = 1.0 if self._scaler is None else self._scaler.loss_scale
        if self.options.debug.check_model_export and self._execution.example is None:
            self._check_export(inputs)
        scale = None if self._scaler is None else torch.tensor(self._scale, device=self._device)
        accumulated = self._optimizer.set_aside() if self._combines_each else {}
        put_back = Buffers(self._combined).note() if self._files.pending else None
        try:
            results = self._execution.train(inputs, scale)
            if self._files.pending:
                forward = export(self._combined, self.model_desc, inputs, self.options)
                self._files.write(self.model_desc, inputs, results, self._weights, self._optimizer, forward)
        except BaseException:
            if put_back is not None:
                put_back()
            if not self._accumulated:
                self._optimizer.zero_grad()
            self._optimizer.add(accumulated)
            raise
        steps = self.options.batch.gradient_accumulation_steps
        updates = self._accumulated + 1 >= steps
        if updates or self._combines_each:
            self._optimizer.combine()
        self._optimizer.add(accumulated)
        if updates:
            finite = self._optimizer.step(lr, 1.0 / (steps * self._scale))
            self._optimizer.zero_grad()
            info.optimization_step += finite
            self._skipped += not finite
            if self._scaler is not None:
                info.all_finite = finite
        self._accumulated = 0 if updates else self._accumulated + 1
        info.step += 1
        if updates and self._scaler is not None:
            self._scaler.update(info)
        self._execution.done(inputs, results)
        return _given_out([results[i] for i in picked])

    def eval_step(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs in evaluation mode, without gradients; arguments, result and errors as of :meth:`train_step`."""
        inputs = self._execution.inputs(args, kwargs)
        self._check_parameters()
        picked = self._picked()
        results = self._execution.eval(inputs)
        self._execution.done(inputs, results)
        return _given_out([results[i] for i in picked])

    def _picked(self) -> list[int]:
        fetches, names = self._train_step_info.fetches, self.model_desc.output_names()
        invalid = [name for name in fetches if name not in names]
        if invalid:
            raise RuntimeError(
                f"The specified fetches list contains invalid output names: {invalid}; the outputs are {names}."
            )
        return [names.index(name) for name in fetches] if fetches else list(range(len(names)))

    def _learning_rate(self) -> float:
        schedule = self.options.lr_scheduler
        if schedule is not None:
            return float(schedule._step(self._train_step_info)[0])
        # it may have been changed since the last step
        return number("optim_config.lr", self.optim_config.lr, low=0)

    # -- ONNX files -----------------------------------------------------------------------------------------------

    def save_as_onnx(self, path: str) -> None:
        """Write the model with its loss, in evaluation mode and with the present weights.

        The file is loaded before it appears, and run on the inputs of a step beside the module.

        Args:
            path: of the file; one that exists is replaced.

        Raises:
            AssertionError: ``path`` is no string.
            ValueError: it is a folder, or its folder does not exist.
            ExportError: torch cannot trace the model for all sizes that ``model_desc`` leaves open, or ONNX Runtime
                does not load the file.
            MismatchError: the file gives other results than the module.

        Warns:
            UserWarning: before the first step of a module, when nothing is written because the types of the inputs
                are unknown. An ONNX model tells them.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise AssertionError("'path' must be a valid path string")
        model = self._exported()
        if model is None:
            warnings.warn(
                "Training session is not initialized yet. 'train_step' or 'eval_step' methods must be executed at "
                "least once before calling 'save_as_onnx()'.",
                UserWarning,
                stacklevel=2,
            )
            return
        if not os.fspath(path) or not os.path.isdir(os.path.dirname(os.fspath(path)) or "."):
            raise ValueError(f"'path' is not valid or does not exist: {os.fspath(path)!r}")
        if os.path.isdir(path):
            raise ValueError(f"'path' is not valid, it is a folder: {os.fspath(path)!r}. Name a file in it.")
        names, inputs = [entry.name for entry in self.model_desc.inputs], self._execution.example
        # values that are made up may be none that the model takes
        expected = None if inputs is None else results_of(self._combined, names, inputs)
        save(model, path, lambda file: check_sample(file, names, inputs or (), expected))

    def _exported(self) -> ir.Model | None:
        """The model as :meth:`save_as_onnx` writes it; ``None`` as long as the types of its inputs are unknown."""
        if self._execution.example is not None:
            return export(self._combined, self.model_desc, self._execution.example, self.options)
        if self._made_up is None:
            return None
        try:
            return export(self._combined, self.model_desc, self._made_up, self.options)
        except Exception as error:
            sizes = [list(x.shape) for x in self._made_up]
            raise RuntimeError(
                f"The model could not be exported with made-up inputs of the sizes {sizes}: {error}. Execute "
                "'train_step' or 'eval_step' once before 'save_as_onnx()'."
            ) from error

    def _check_export(self, inputs: Sequence[Tensor]) -> None:
        names = [entry.name for entry in self.model_desc.inputs]
        model = export(self._combined, self.model_desc, inputs, self.options)
        check_export(model, names, inputs, self._execution.eval(inputs))


def _given_out(results: list[Tensor]) -> Any:
    return results[0] if len(results) == 1 else results


def make_module(model: nn.Module | onnx.ModelProto, description: Description, options: ORTTrainerOptions) -> nn.Module:
    """``model`` itself, or an ONNX model converted.

    Raises:
        NotImplementedError: ``extra_postprocess``, which rewrites ONNX models, was given for a module.
        ValueError: names of an ONNX model are not those described.
    """
    rewrite = options._internal_use.extra_postprocess
    if isinstance(model, nn.Module):
        if rewrite is not None:
            raise NotImplementedError(
                "options['_internal_use.extra_postprocess'] rewrites the ONNX model that is trained, but a module is "
                "compiled without one. Export it, and train the onnx.ModelProto."
            )
        return model
    if rewrite is not None:
        model = rewrite(model) or model
    assert isinstance(model, onnx.ModelProto)
    stored = {initializer.name for initializer in model.graph.initializer}
    for kind, described, values in (
        ("inputs", description.inputs, model.graph.input),
        ("outputs", description.outputs, model.graph.output),
    ):
        own = [value.name for value in values if value.name not in stored]
        wanted = [entry.name for entry in described]
        if own != wanted:
            raise ValueError(f"The ONNX model has the {kind} {own}, but model_desc describes {wanted}.")
    return to_torch(model, frozen=options.utils.frozen_weights)


def example_inputs(model: onnx.ModelProto, description: Description) -> list[Tensor]:
    """Made-up inputs of an ONNX model: zeros of its types and of the described sizes, those that may change are 2.

    Raises:
        UnsupportedError: an input has no type that torch has.
    """
    types = {value.name: input_type(value) for value in model.graph.input}
    return [
        torch.zeros([2 if isinstance(size, str) else size for size in entry.shape], dtype=types[entry.name])
        for entry in description.inputs
    ]
