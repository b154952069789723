"""The trainer of the older interface."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn

from lightning_ort import optim, trainer
from lightning_ort.amp import DynamicLossScaler
from lightning_ort.optim.lr_scheduler import _LRScheduler
from lightning_ort.ort_trainer.description import IODescription, ModelDescription
from lightning_ort.ort_trainer.scaler import as_scaler
from lightning_ort.trainer import ORTTrainerOptions, TrainStepInfo
from lightning_ort.validation import names, number, shown, whole

__all__ = ["ORTTrainer"]

_SCALE = "default_loss_scale_input_name"


class _Rate(_LRScheduler):
    """``get_lr_this_step`` as a schedule; ``learning_rate`` of a step goes first."""

    def __init__(self, function: Callable[[int], float] | None) -> None:
        super().__init__()
        self.function = function
        self.learning_rate: float | None = None

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        if self.learning_rate is not None:
            return [self.learning_rate]
        assert self.function is not None, "a step without a function is given its learning rate"
        return [_float(self.function(train_step_info.optimization_step))]


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
        loss_scaler: for mixed precision, without which it has nothing to do: a :class:`LossScaler` of this package or
            of :mod:`lightning_ort.amp`, or any object with ``loss_scale_`` and ``update_loss_scale(is_all_finite)``.

    Raises:
        As :class:`lightning_ort.ORTTrainer`.

    Attributes:
        loss_scale_input_name: name under which :meth:`train_step` takes a loss scale, in mixed precision without a
            ``loss_scaler``.
        is_train: whether a call is a training step.
    """

    loss_scale_input_name = _SCALE

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
        loss_scaler: Any = None,
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
        _check(
            training_optimizer_name, model_desc, map_optimizer_attributes, learning_rate_description, device,
            world_rank, global_step, get_lr_this_step,
        )  # fmt: skip
        scaler = as_scaler(loss_scaler)
        # without a scaler of the user's a step may be given its scale, and tells whether the gradients were finite
        self._own_scale = DynamicLossScaler() if use_mixed_precision is True and scaler is None else None
        used_scaler = (scaler or self._own_scale) if use_mixed_precision is True else None
        self._rate = _Rate(get_lr_this_step)
        self._rate_name = learning_rate_description.name_
        options = ORTTrainerOptions(
            {
                "batch": {"gradient_accumulation_steps": gradient_accumulation_steps},
                "device": {"id": str(device)},
                "distributed": {
                    "world_rank": max(world_rank, 0),
                    "world_size": world_size,
                    "allreduce_post_accumulation": allreduce_post_accumulation,
                    "deepspeed_zero_optimization": {"stage": deepspeed_zero_stage},
                    "enable_adasum": enable_adasum,
                },
                "lr_scheduler": self._rate,
                "mixed_precision": {"enabled": use_mixed_precision, "loss_scaler": used_scaler},
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
        config = _OPTIMIZERS[training_optimizer_name](**_arguments(model, map_optimizer_attributes))
        self._trainer = trainer.ORTTrainer(model, _described(model_desc), config, loss_fn, options)
        inputs = self._trainer.model_desc.inputs
        inputs[:] = [
            e if io.dtype_ is None else e.typed(io.dtype_) for e, io in zip(inputs, model_desc.inputs_, strict=True)
        ]
        self._trainer._train_step_info.optimization_step = global_step
        self.is_train = True

    @property
    def onnx_model_(self) -> onnx.ModelProto | None:
        """The model with its loss and the present weights; ``None`` before the first step of a module."""
        model = self._trainer._exported()
        return None if model is None else ir.to_proto(model)

    def train(self) -> None:
        """Let calls be training steps."""
        self.is_train = True

    def eval(self) -> None:
        """Let calls be evaluations."""
        self.is_train = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """:meth:`train_step`, or after :meth:`eval` :meth:`eval_step`."""
        return self.train_step(*args, **kwargs) if self.is_train else self.eval_step(*args, **kwargs)

    def train_step(self, *args: Any, fetches: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """One step.

        Args:
            *args: inputs and labels, or one list of them; then the learning rate if there is no ``get_lr_this_step``,
                and in mixed precision without a ``loss_scaler`` the loss scale, which is chosen here if it is never
                given. Each is a tensor, the last two of one number.
            fetches: names of outputs; all by default.
            **kwargs: the same by name.

        Returns:
            The outputs, the loss first; a single one as it is. In mixed precision without a ``loss_scaler``, whether
            the gradients were finite follows them on steps that update.

        Raises:
            AssertionError: there is no learning rate, or a loss scale that differs from that of the gradients to which
                these are to be added; see :meth:`lightning_ort.ORTTrainer.train_step` for all else.
            TypeError, ValueError: the learning rate or the loss scale is no finite number.
        """
        positional = list(args[0]) if len(args) == 1 and isinstance(args[0], list) else list(args)
        accepted = [] if self._rate.function is not None else [self._rate_name]
        accepted += [] if self._own_scale is None else [self.loss_scale_input_name]
        given = {name: kwargs.pop(name) for name in (self._rate_name, *accepted) if name in kwargs}
        surplus = len(positional) + len(kwargs) - len(self._trainer.model_desc.inputs)
        for name in [name for name in accepted if name not in given][: max(surplus, 0)]:
            # in this order after the inputs
            given[name] = positional.pop(len(positional) - surplus)
            surplus -= 1
        if self._rate.function is None and self._rate_name not in given:
            raise AssertionError(
                f"The learning rate {self._rate_name!r} is missing: give it after the inputs or by name, or "
                "get_lr_this_step to the trainer."
            )
        rate = None if self._rate_name not in given else number(self._rate_name, _float(given[self._rate_name]), low=0)
        self._set_scale(given)
        before = self._trainer._train_step_info.step
        accumulating = self._trainer._accumulated + 1 < self._trainer.options.batch.gradient_accumulation_steps
        self._rate.learning_rate = rate
        try:
            results = self._with_fetches(fetches, lambda: self._trainer.train_step(*positional, **kwargs))
        finally:
            self._rate.learning_rate = None
        assert self._trainer._train_step_info.step == before + 1
        if self._own_scale is not None and not accumulating and not fetches:
            finite = torch.tensor(self._trainer._train_step_info.all_finite)
            return [*(results if isinstance(results, list) else [results]), finite]
        return results

    def _set_scale(self, given: Mapping[str, Any]) -> None:
        if self._own_scale is None or self.loss_scale_input_name not in given:
            return
        scale = number("loss scale", _float(given[self.loss_scale_input_name]), above=0)
        if self._trainer._accumulated and scale != self._own_scale.loss_scale:
            raise AssertionError(
                f"The loss scale is {scale:g}, but {self._own_scale.loss_scale:g} for the gradients to which those of "
                "this step are added: change it after an update."
            )
        self._own_scale.automatic_update = False
        self._own_scale.loss_scale = scale

    def eval_step(self, *args: Any, fetches: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Outputs in evaluation mode; arguments as of :meth:`train_step`, without a learning rate."""
        return self._with_fetches(fetches, lambda: self._trainer.eval_step(*args, **kwargs))

    def _with_fetches(self, fetches: Sequence[str] | None, call: Callable[[], Any]) -> Any:
        info = self._trainer._train_step_info
        info.fetches = [] if fetches is None else names("fetches", fetches)
        try:
            return call()
        finally:
            info.fetches = []

    def save_as_onnx(self, path: str) -> None:
        """See :meth:`lightning_ort.ORTTrainer.save_as_onnx`."""
        self._trainer.save_as_onnx(path)

    def state_dict(self, include_optimizer_state: bool = True) -> dict[str, Tensor]:
        """Weights by name, and the moments of the optimizer as ``Moment_1_<name>`` and so on.

        With stage 1 of ZeRO it has the moments that fall to this process.
        """
        state = self._trainer.state_dict()
        found = {name: torch.as_tensor(value) for name, value in state["model"]["full_precision"].items()}
        if include_optimizer_state:
            for name, values in state["optimizer"].items():
                prefix = {key: key if name == "shared_optimizer_state" else f"{key}_{name}" for key in values}
                found |= {prefix[key]: torch.as_tensor(value) for key, value in values.items()}
        return found

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = False) -> None:
        """Take over what :meth:`state_dict` gave.

        Args:
            state_dict: by name; what it lacks stays as it is.
            strict: refuse names that are missing or unknown.

        Raises:
            TypeError: it is no dictionary.
            RuntimeError: see ``strict``, or a shape is not the model's; nothing has been changed.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict={shown(state_dict)}: expected a dictionary of tensors.")
        own = self._trainer.state_dict()
        flat = self.state_dict()
        unexpected = [name for name in state_dict if name not in flat]
        missing = [name for name in flat if name not in state_dict]
        # what falls to other processes is in a state that was put together
        layout = self._trainer._optimizer.layout()
        elsewhere = {f"{key}_{name}" for name, values in layout.items() for key in values}
        unexpected = [name for name in unexpected if name not in elsewhere]
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


def _check(
    training_optimizer_name: Any,
    model_desc: Any,
    map_optimizer_attributes: Any,
    learning_rate_description: Any,
    device: Any,
    world_rank: Any,
    global_step: Any,
    get_lr_this_step: Any,
) -> None:
    """Refuse what the options of the newer interface do not check."""
    if training_optimizer_name not in _OPTIMIZERS:
        raise ValueError(
            f"training_optimizer_name={shown(training_optimizer_name)}; expected one of {', '.join(_OPTIMIZERS)}."
        )
    for name, given, expected in (
        ("model_desc", model_desc, ModelDescription),
        ("learning_rate_description", learning_rate_description, IODescription),
    ):
        if not isinstance(given, expected):
            raise TypeError(f"{name}={shown(given)}: expected a {expected.__name__}.")
    for name, function in (
        ("map_optimizer_attributes", map_optimizer_attributes),
        ("get_lr_this_step", get_lr_this_step),
    ):
        if function is not None and not callable(function):
            raise TypeError(f"{name}={shown(function)}: expected a function, or None.")
    whole("global_step", global_step, low=0)
    whole("world_rank", world_rank, low=-1)
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device={shown(device)}: expected 'cpu', 'cuda' or a torch.device.")


def _described(model_desc: ModelDescription) -> dict[str, Any]:
    """The description in the form of the newer interface: the first output is the loss."""
    return {
        "inputs": [(io.name_, io.shape_) for io in model_desc.inputs_],
        "outputs": [(io.name_, io.shape_, i == 0) for i, io in enumerate(model_desc.outputs_)],
    }


def _float(value: Any) -> Any:
    """The number of a tensor or an array that holds one; all else as it is."""
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        count = value.numel() if isinstance(value, Tensor) else value.size
        return value.item() if count == 1 else value
    return value


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
        given = attributes(name)
        if not isinstance(given, Mapping):
            raise TypeError(
                f"map_optimizer_attributes({name!r}) gave {shown(given)}; expected a dictionary of hyper-parameters."
            )
        values = {_RENAMED.get(key, key): value for key, value in given.items()}
        if "do_bias_correction" in values:  # an int attribute there
            values["do_bias_correction"] = bool(values["do_bias_correction"])
        if values:
            groups.append({"params": [name], **values})
    return {"params": groups} if groups else {}
