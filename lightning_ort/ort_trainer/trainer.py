"""The older interface, ``onnxruntime.capi.ort_trainer``, on top of :class:`lightning_ort.ORTTrainer`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from lightning_ort import optim, trainer
from lightning_ort.amp import LossScaler
from lightning_ort.optim.lr_scheduler import _LRScheduler
from lightning_ort.trainer import ORTTrainerOptions, TrainStepInfo

__all__ = ["IODescription", "ModelDescription", "ORTTrainer"]


class IODescription:
    """One input or output.

    Args:
        name: its name.
        shape: sizes; names for those that may change.
        dtype: element type; the first step decides if it is left out.
        num_classes: number of classes, of labels from which the original made up data. Nothing is made up here.
    """

    def __init__(
        self, name: str, shape: Sequence[int | str], dtype: torch.dtype | None = None, num_classes: int | None = None
    ) -> None:
        if num_classes is not None:
            raise NotImplementedError(
                f"num_classes={num_classes} served to make up labels for an export; no data is made up here. Leave it "
                "out."
            )
        self.name_, self.shape_, self.dtype_ = name, list(shape), dtype


class ModelDescription:
    """Inputs and outputs of a model; the first output is the loss."""

    def __init__(self, inputs: Sequence[IODescription], outputs: Sequence[IODescription]) -> None:
        self.inputs_, self.outputs_ = list(inputs), list(outputs)


class _Rate(_LRScheduler):
    """``get_lr_this_step`` as a schedule; ``learning_rate`` of a step goes first."""

    def __init__(self, function: Callable[[int], float] | None) -> None:
        super().__init__()
        self.function = function
        self.given: float | None = None

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        if self.given is not None:
            return [self.given]
        if self.function is None:
            return [train_step_info.optimizer_config.lr]
        return [float(self.function(train_step_info.optimization_step))]


_OPTIMIZERS: dict[str, type] = {
    "AdamOptimizer": optim.AdamConfig,
    "LambOptimizer": optim.LambConfig,
    "SGDOptimizer": optim.SGDConfig,
}
_RENAMED = {"lambda": "lambda_coef"}


class ORTTrainer:
    """Trainer of the older interface; use :class:`lightning_ort.ORTTrainer` in new code.

    Args:
        model: module or ONNX model.
        loss_fn: function of prediction and label, or ``None``.
        model_desc: the description.
        training_optimizer_name: ``"AdamOptimizer"``, ``"LambOptimizer"`` or ``"SGDOptimizer"``.
        map_optimizer_attributes: function from a weight's name to its hyper-parameters, or ``None``.
        learning_rate_description: description of the input that takes the learning rate of a step.
        device: where to compute.
        gradient_accumulation_steps: see :class:`~lightning_ort.ORTTrainerOptions`, as all that follow.
        global_step: number of updates to start from.
        get_lr_this_step: function from the number of updates to the learning rate.
        loss_scaler: for mixed precision.

    Raises:
        As :class:`lightning_ort.ORTTrainer`.
    """

    def __init__(
        self,
        model: nn.Module | onnx.ModelProto,
        loss_fn: Callable[[Any, Tensor], Tensor] | None,
        model_desc: ModelDescription,
        training_optimizer_name: str,
        map_optimizer_attributes: Callable[[str], Mapping[str, Any]] | None,
        learning_rate_description: IODescription,
        device: torch.device | str,
        gradient_accumulation_steps: int = 1,
        world_rank: int = 0,
        world_size: int = 1,
        use_mixed_precision: bool = False,
        allreduce_post_accumulation: bool = False,
        global_step: int = 0,
        get_lr_this_step: Callable[[int], float] | None = None,
        loss_scaler: LossScaler | None = None,
        deepspeed_zero_stage: int = 0,
        enable_grad_norm_clip: bool = True,
        frozen_weights: Sequence[str] = (),
        _opset_version: int = 14,
        _enable_internal_postprocess: bool = True,
        _extra_postprocess: Callable[[onnx.ModelProto], onnx.ModelProto] | None = None,
        _use_deterministic_compute: bool = False,
        use_memory_efficient_gradient: bool = False,
        run_symbolic_shape_infer: bool = False,
        enable_adasum: bool = False,
        optimized_model_filepath: str = "",
    ) -> None:
        warnings.warn(
            "lightning_ort.ort_trainer.ORTTrainer keeps old scripts running; new ones use lightning_ort.ORTTrainer.",
            DeprecationWarning,
            stacklevel=2,
        )
        if training_optimizer_name not in _OPTIMIZERS:
            raise ValueError(
                f"training_optimizer_name={training_optimizer_name!r}; expected one of {', '.join(_OPTIMIZERS)}."
            )
        self._rate = _Rate(get_lr_this_step)
        self._rate_name = learning_rate_description.name_
        options = ORTTrainerOptions(
            {
                "batch": {"gradient_accumulation_steps": gradient_accumulation_steps},
                "device": {"id": str(device)},
                "distributed": {
                    "world_rank": max(world_rank, 0),
                    "world_size": max(world_size, 1),
                    "allreduce_post_accumulation": allreduce_post_accumulation,
                    "deepspeed_zero_optimization": {"stage": deepspeed_zero_stage},
                    "enable_adasum": enable_adasum,
                },
                "lr_scheduler": self._rate,
                "mixed_precision": {"enabled": use_mixed_precision, "loss_scaler": loss_scaler},
                "utils": {
                    "frozen_weights": list(frozen_weights),
                    "grad_norm_clip": enable_grad_norm_clip,
                    "memory_efficient_gradient": use_memory_efficient_gradient,
                    "run_symbolic_shape_infer": run_symbolic_shape_infer,
                },
                "debug": {
                    "deterministic_compute": _use_deterministic_compute,
                    "graph_save_paths": {"model_with_training_graph_after_optimization_path": optimized_model_filepath},
                },
                "_internal_use": {
                    "enable_internal_postprocess": _enable_internal_postprocess,
                    "extra_postprocess": _extra_postprocess,
                    "onnx_opset_version": _opset_version,
                },
            }
        )
        described = {
            "inputs": [(io.name_, io.shape_) for io in model_desc.inputs_],
            "outputs": [(io.name_, io.shape_, i == 0) for i, io in enumerate(model_desc.outputs_)],
        }
        config = _OPTIMIZERS[training_optimizer_name](**_arguments(model, map_optimizer_attributes))
        self._trainer = trainer.ORTTrainer(model, described, config, loss_fn, options)
        for entry, io in zip(self._trainer.model_desc.inputs, model_desc.inputs_, strict=True):
            entry.dtype = io.dtype_
        self._trainer._train_step_info.optimization_step = global_step

    def train_step(self, *args: Any, fetches: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """One step.

        Args:
            *args: inputs and labels, then the learning rate if there is no ``get_lr_this_step``, each a tensor.
            fetches: names of outputs; all by default.
            **kwargs: the same by name.

        Returns:
            The outputs, the loss first; a single one as it is. With mixed precision, whether the gradients were
            finite follows them on steps that update.
        """
        positional = list(args)
        rate = kwargs.pop(self._rate_name, None)
        known = len(self._trainer.model_desc.inputs)
        if rate is None and len(positional) + len(kwargs) > known and positional:
            rate = positional.pop(known - len(kwargs))
        before = self._trainer._train_step_info.step
        accumulating = self._trainer._accumulated + 1 < self._trainer.options.batch.gradient_accumulation_steps
        self._rate.given = None if rate is None else float(rate)
        try:
            results = self._with_fetches(fetches, lambda: self._trainer.train_step(*positional, **kwargs))
        finally:
            self._rate.given = None
        assert self._trainer._train_step_info.step == before + 1
        if self._trainer.options.mixed_precision.enabled and not accumulating and not fetches:
            finite = torch.tensor(self._trainer._train_step_info.all_finite)
            return [*(results if isinstance(results, list) else [results]), finite]
        return results

    def eval_step(self, *args: Any, fetches: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Outputs in evaluation mode; arguments as of :meth:`train_step`, without a learning rate."""
        return self._with_fetches(fetches, lambda: self._trainer.eval_step(*args, **kwargs))

    def _with_fetches(self, fetches: Sequence[str] | None, call: Callable[[], Any]) -> Any:
        info = self._trainer._train_step_info
        info.fetches = list(fetches or [])
        try:
            return call()
        finally:
            info.fetches = []

    def save_as_onnx(self, path: str) -> None:
        """See :meth:`lightning_ort.ORTTrainer.save_as_onnx`."""
        self._trainer.save_as_onnx(path)

    def state_dict(self, include_optimizer_state: bool = True) -> dict[str, Tensor]:
        """Weights by name, and the moments of the optimizer as ``Moment_1_<name>`` and so on."""
        state = self._trainer.state_dict()
        found = {name: torch.as_tensor(value) for name, value in state["model"]["full_precision"].items()}
        if include_optimizer_state:
            for name, values in state["optimizer"].items():
                prefix = {key: key if name == "shared_optimizer_state" else f"{key}_{name}" for key in values}
                found |= {prefix[key]: torch.as_tensor(value) for key, value in values.items()}
        return found

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = False) -> None:
        """Take over what :meth:`state_dict` gave."""
        own = self._trainer.state_dict()
        flat = self.state_dict()
        unexpected = [name for name in state_dict if name not in flat]
        missing = [name for name in flat if name not in state_dict]
        if strict and (missing or unexpected):
            raise RuntimeError(f"Missing keys: {missing}; unexpected keys: {unexpected} in state_dict")
        model = {n: state_dict.get(n, value) for n, value in own["model"]["full_precision"].items()}
        optimizer = {
            name: {
                key: state_dict.get(key if name == "shared_optimizer_state" else f"{key}_{name}", value)
                for key, value in values.items()
            }
            for name, values in own["optimizer"].items()
        }
        self._trainer.load_state_dict({**own, "model": {"full_precision": model}, "optimizer": optimizer})


def _arguments(model: Any, attributes: Callable[[str], Mapping[str, Any]] | None) -> dict[str, Any]:
    """Arguments of the configuration: one group per weight that has hyper-parameters of its own."""
    if attributes is None:
        return {}
    if isinstance(model, nn.Module):
        names = [name for name, _ in model.named_parameters()]
    else:
        names = [initializer.name for initializer in model.graph.initializer]
    groups = []
    for name in names:
        values = {_RENAMED.get(key, key): value for key, value in attributes(name).items()}
        if values:
            groups.append({"params": [name], **values})
    return {"params": groups} if groups else {}
