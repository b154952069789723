"""The state of a trainer, out and in, as nested dictionaries in the layout of ONNX Runtime's ORTTrainer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_ort.amp import LossScaler
from lightning_ort.amp.rules import StepScalerRule
from lightning_ort.checkpoints import lightning, orttrainer
from lightning_ort.checkpoints.conversion import to_trainer
from lightning_ort.distributed.processes import Processes
from lightning_ort.errors import CheckpointError
from lightning_ort.files.reading import cause_of, refusing
from lightning_ort.optim.config import _OptimizerConfig
from lightning_ort.optim.step_info import TrainStepInfo
from lightning_ort.trainer.optimizer import Optimizer, as_array
from lightning_ort.trainer.options import ORTTrainerOptions
from lightning_ort.trainer.step import CombinedModule
from lightning_ort.validation import is_plain, listed, shown

__all__ = ["TrainerState", "settings_of", "weights_of"]

_LOADED = ("model", "optimizer", "train_step_info", "loss_scaler")
"""The keys of a state whose values are taken over."""

_OTHER = ("trainer_options", "partition_info", "user_dict", orttrainer.LIGHTNING)
"""Further ones, of files: they tell of the training that gave it."""


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tensor that has two names occurs once, under the first."""
    # a module made from an ONNX model knows the names that its weights have there
    names = {**getattr(module, "parameter_names", {}), **getattr(module, "buffer_names", {})}
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            found[names.get(name, name)] = tensor
    return found


class TrainerState:
    """What a trainer has learned, out and in: the half of ``ORTTrainer`` that saves and loads.

    Attributes:
        optim_config: see ``ORTTrainer``.
        options: see ``ORTTrainer``.
    """

    optim_config: _OptimizerConfig
    options: ORTTrainerOptions
    _combined: CombinedModule
    _weights: dict[str, Tensor]
    _optimizer: Optimizer
    _scaler: LossScaler | None
    _scaler_settings: dict[str, Any]
    """as it was given: what is loaded may have other ones, in rank 0 alone"""
    _train_step_info: TrainStepInfo
    _from_onnx: bool
    _accumulated: int
    """steps since the last update"""
    _skipped: int
    """updates that were left out because a gradient was not finite"""
    _lightning: dict[str, Any]
    """what a Lightning checkpoint held besides the state"""
    _processes: Processes | None
    _replicated: bool
    """whether all processes have the same weights"""
    _loads: int
    """how often a state was loaded"""

    def state_dict(self, pytorch_format: bool = False) -> dict[str, Any]:
        """Weights, optimizer states, counters and what a checkpoint tells about the options.

        Args:
            pytorch_format: give a flat dictionary of tensors for the module's ``load_state_dict``.

        Returns:
            Copies, numpy arrays in nested dictionaries (``model/full_precision/<name>``,
            ``optimizer/<name>/Moment_1`` ...), or tensors by name. With stage 1 of ZeRO ``optimizer`` has the weights
            that fall to this process.
        """
        if pytorch_format and self._from_onnx:
            return {name: t.detach().clone() for name, t in self._weights.items()}
        if pytorch_format:
            return {name: t.detach().clone() for name, t in self._combined.model.state_dict().items()}
        return _make_state(self)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Take over what :meth:`state_dict` gave, before or after the first step.

        Of several processes all load, at the same step; what they go on with is then rank 0's. With stage 1 of ZeRO
        they load the whole state, or each what it gave.

        Args:
            state_dict: nested dictionaries; weights and states may be numpy arrays or tensors.
            strict: refuse keys that are missing or unexpected. Otherwise what is missing stays as it is.

        Raises:
            TypeError: it is no dictionary. Nothing has been changed.
            RuntimeError: see ``strict``; nothing in it is this trainer's; or a shape is not the model's. Nothing has
                been changed.
            AssertionError: the state of another optimizer. Nothing has been changed.

        Warns:
            UserWarning: the model, the optimizer or the counters are missing altogether.
        """
        self._take_in_thawed()
        _check_state(self, state_dict, strict=strict)
        _load_state(self, state_dict)
        self._lightning = {}
        self._optimizer.zero_grad()
        self._accumulated = 0
        self._loads += 1
        self._replicated = self._processes is None

    def _take_in_thawed(self) -> None:
        """Train weights, too, that did not want gradients when the trainer was made."""
        raise NotImplementedError

    def _replicate(self) -> None:
        """Give all processes the state of rank 0 before the first step, and before the first one after a loading."""
        if self._processes is None or self._replicated:
            return
        tensors = self._with_all_buffers()
        self._processes.agree(_facts(self), tensors, self._optimizer.names())
        self._processes.broadcast(list(tensors.values()))
        numbers = _numbers(self)
        if not self._shares_states():
            moments = self._optimizer.updater.moments.values()
            self._processes.broadcast([t for states in moments for t in states.values()])
            numbers["optimizer"] = self._optimizer.counts()
        _load_state(self, self._processes.of_first(numbers))
        self._replicated = True

    def _with_all_buffers(self) -> dict[str, Tensor]:
        """The weights, and those buffers of model and loss that are in no state; each tensor once."""
        known = {id(t) for t in self._weights.values()}
        buffers = {name: t for name, t in self._combined.named_buffers() if id(t) not in known}
        return self._weights | {name.removeprefix("model."): t for name, t in buffers.items()}

    def _shares_states(self) -> bool:
        return self._processes is not None and self.options.distributed.deepspeed_zero_optimization.stage > 0

    def save_checkpoint(
        self,
        path: str | os.PathLike[str] | IO[bytes],
        user_dict: Mapping[str, Any] = {},
        include_optimizer_states: bool = True,
    ) -> None:
        """Write the state to an HDF5 file, which appears under its name when it is complete.

        Of several processes one need do so; with stage 1 of ZeRO each does, to a file of its own.

        Args:
            path: a file that does not exist yet, or an open binary file.
            user_dict: your own data: nested dictionaries, lists, tuples, strings, numbers, arrays and tensors.
            include_optimizer_states: write the states of the optimizer too.

        Raises:
            FileExistsError: there is a file of that name.
            FileNotFoundError: its folder does not exist.
            TypeError: ``user_dict`` holds something else.
        """
        state = self.state_dict()
        if not include_optimizer_states:
            del state["optimizer"]
        if self._lightning:
            state[orttrainer.LIGHTNING] = self._lightning
        orttrainer.write(path, state, user_dict)

    def load_checkpoint(
        self,
        *paths: str | os.PathLike[str] | IO[bytes],
        strict: bool = True,
        allow_pickle: bool = False,
        prefix: str | None = None,
    ) -> dict[str, Any]:
        """Load the file that :meth:`save_checkpoint`, ONNX Runtime's ORTTrainer, or Lightning has written.

        Of a Lightning checkpoint, which must have been written under ``strategy="ort"``, weights, optimizer states,
        counters and the loss scale are taken over. All else is kept and written into files of
        :meth:`save_checkpoint`, for Lightning to go on from them.

        Args:
            *paths: the file, or all files of a training on several devices with stage 1 of ZeRO.
            strict: see :meth:`load_state_dict`.
            allow_pickle: accept ``user_dict`` of a file of ONNX Runtime's, which is pickled, and objects among the
                hyper-parameters of a Lightning checkpoint. Unpickling executes whatever the author of a file put into
                it.
            prefix: what the names of a Lightning checkpoint begin with where this trainer's have none, such as
                ``"net."``; needed only where more than one would fit.

        Returns:
            The ``user_dict`` that was saved; of a Lightning checkpoint its ``epoch`` and ``global_step``.

        Raises:
            TypeError: something else than paths and files.
            CheckpointError: no checkpoint, none of an ORTTrainer, or a damaged one; a Lightning checkpoint whose names
                or optimizer do not fit. It is a ``ValueError``; for a damaged file also an ``OSError``.
            ValueError: ``user_dict`` is pickled.
            AssertionError: more or fewer files than the checkpoint has, or another optimizer's.
            RuntimeError: see :meth:`load_state_dict`.
        """
        for path in paths:
            if not isinstance(path, (str, os.PathLike)) and not callable(getattr(path, "read", None)):
                raise TypeError(f"path={shown(path)}: expected the path of a checkpoint, or an open binary file.")
        if len(paths) == 1 and lightning.is_lightning(paths[0]):
            found = lightning.read(paths[0], allow_pickle=allow_pickle)
            with refusing(paths[0], "a checkpoint of Lightning whose content does not fit together"):
                state, rest = to_trainer(found, self._weights, self._optimizer.names(), prefix, paths[0])
                user_dict = {key: found[key] for key in ("epoch", "global_step")}
            kept = lightning.pack(rest)
        else:
            state, user_dict = orttrainer.read_all(paths, allow_pickle=allow_pickle)
            kept = state.pop(orttrainer.LIGHTNING, {})
        try:
            self.load_state_dict(state, strict=strict)
        except (AssertionError, RuntimeError) as error:
            raise type(error)(f"{', '.join(map(str, paths))}: {error}") from error
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(f"{', '.join(map(str, paths))} does not fit together: {cause_of(error)}.") from error
        self._lightning = kept
        return user_dict


def _trainer_options(trainer: TrainerState) -> dict[str, Any]:
    """What a checkpoint tells about the options."""
    distributed = trainer.options.distributed
    return {
        "mixed_precision": trainer.options.mixed_precision.enabled,
        "zero_stage": distributed.deepspeed_zero_optimization.stage,
        "world_rank": distributed.world_rank,
        "world_size": distributed.world_size,
        "optimizer_name": trainer.optim_config.name,
        "data_parallel_size": distributed.world_size,
        "horizontal_parallel_size": distributed.horizontal_parallel_size,
    }


def _make_state(trainer: TrainerState) -> dict[str, Any]:
    """Copies of all that makes up the state, as numpy arrays and numbers."""
    return {
        "model": {"full_precision": {n: as_array(t) for n, t in trainer._weights.items()}},
        "optimizer": trainer._optimizer.state(),
        "trainer_options": _trainer_options(trainer),
        **_numbers(trainer),
    }


def _numbers(trainer: TrainerState) -> dict[str, Any]:
    """Counters, and the loss scaler."""
    info = trainer._train_step_info
    scaler = {} if trainer._scaler is None else {"loss_scaler": _scaler_state(trainer)}
    return {"train_step_info": {"optimization_step": info.optimization_step, "step": info.step}, **scaler}


def _facts(trainer: TrainerState) -> dict[str, Any]:
    """Settings that must be the same in all processes."""
    options = trainer.options
    values = {
        "batch.gradient_accumulation_steps": options.batch.gradient_accumulation_steps,
        "distributed.allreduce_post_accumulation": options.distributed.allreduce_post_accumulation,
        "distributed.deepspeed_zero_optimization.stage": options.distributed.deepspeed_zero_optimization.stage,
        "distributed.enable_adasum": options.distributed.enable_adasum,
        "mixed_precision.enabled": options.mixed_precision.enabled,
        "utils.grad_norm_clip": options.utils.grad_norm_clip,
    }
    facts: dict[str, Any] = {f"options[{path!r}]": value for path, value in values.items()}
    facts |= {"optim_config": trainer.optim_config.name, "optim_config.lr": trainer.optim_config.lr}
    for name in trainer._optimizer.names():
        values = trainer.optim_config.hyper_parameters(name)
        facts |= {f"optim_config's {key} of {name!r}": value for key, value in values.items()}
    facts |= settings_of("options['lr_scheduler']", options.lr_scheduler) | trainer._scaler_settings
    if trainer._shares_states():
        # the moments of a process are in no other, which could broadcast them
        facts["number of loaded states"] = trainer._loads
    return facts


def settings_of(title: str, given: Any) -> dict[str, Any]:
    """The class of a schedule or a scaler, and the settings of one of this package.

    Of a class of the user's own nobody knows which attributes are settings that must be the same in all processes.

    Args:
        title: what the user calls it.
        given: the object, or ``None``.

    Returns:
        Values by the words of a message.
    """
    if given is None:
        return {title: None}
    facts = {title: type(given).__name__}
    if type(given).__module__.partition(".")[0] == __name__.partition(".")[0]:
        # what begins with an underscore is progress, or follows from the others
        facts |= {f"{title}.{k}": v for k, v in vars(given).items() if not k.startswith("_") and is_plain(v)}
    return facts


def _scaler_state(trainer: TrainerState) -> dict[str, Any]:
    return {**StepScalerRule(trainer._scaler).summary(), "skipped_steps": trainer._skipped}


def _check_state(trainer: TrainerState, state: Any, *, strict: bool) -> None:
    """Raise if ``state`` cannot be loaded; nothing is changed.

    Raises:
        TypeError: it is no dictionary.
        RuntimeError: with ``strict``, keys that are missing or unexpected; a shape that is not the trainer's.
        AssertionError: the state of another optimizer.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"'state_dict' must be a dict, not {type(state).__name__}")
    _check_sections(state, strict)
    weights = state.get("model", {}).get("full_precision", {})
    if "model" in state:
        _compare_keys(weights, trainer._weights, "state_dict[model][full_precision]", strict)
        if weights and not set(weights) & set(trainer._weights):
            raise RuntimeError(
                "No key of state_dict[model][full_precision] is a weight of the model. "
                f"Its keys: {listed(map(repr, weights))}; the weights: {listed(map(repr, trainer._weights))}."
            )
    for name, value in weights.items():
        if name in trainer._weights:
            _compare_shapes(value, trainer._weights[name], f"state_dict[model][full_precision][{name}]")
    if "optimizer" in state:
        own, given, mine = trainer._optimizer.layout(), state["optimizer"], trainer._optimizer.counts()
        elsewhere = own.keys() - mine.keys()
        # an older file may have a step per weight and none that is shared, or the reverse
        _compare_keys(given, own, "state_dict[optimizer]", strict, {"shared_optimizer_state", *elsewhere})
        for name, values in given.items():
            if name not in own or name == "shared_optimizer_state":
                continue
            where = f"state_dict[optimizer][{name}]"
            _compare_keys(values, own[name], where, strict, {"Update_Count"} if not given.get(name) else set())
            for key in values.keys() & own[name].keys():
                _compare_shapes(values[key], own[name][key], f"{where}[{key}]")
    theirs = state.get("trainer_options", {}).get("optimizer_name", trainer.optim_config.name)
    if "optimizer" in state and theirs != trainer.optim_config.name:
        raise AssertionError(f"Optimizer mismatch: expected {trainer.optim_config.name}, got {theirs}")
    if strict and "model" not in state:
        warnings.warn("Missing key: model in state_dict", UserWarning, stacklevel=4)
    if strict and "optimizer" not in state:
        warnings.warn("Missing key: optimizer in state_dict", UserWarning, stacklevel=4)
    if "train_step_info" not in state:
        warnings.warn("Missing key: train_step_info in state_dict", UserWarning, stacklevel=4)


def _check_sections(state: Mapping[str, Any], strict: bool) -> None:
    """Refuse what has nothing of a state, such as the weights of a module alone."""
    if not any(key in state for key in _LOADED):
        raise RuntimeError(
            f"state_dict has none of the keys {', '.join(_LOADED)}: nothing of it could be loaded. Its keys: "
            f"{listed(map(repr, state))}. Expected what ORTTrainer.state_dict() gives; where there are only weights, "
            "{'model': {'full_precision': weights}}."
        )
    _compare_keys(state, {}, "state_dict", strict, {*_LOADED, *_OTHER})
    if "model" in state and "full_precision" not in state["model"]:
        raise RuntimeError(
            f"Missing keys: ['full_precision'] in state_dict[model]; it has {listed(map(repr, state['model']))}."
        )


def _compare_keys(
    given: Mapping[str, Any], own: Mapping[str, Any], where: str, strict: bool, optional: set[str] | None = None
) -> None:
    if not strict:
        return
    missing = [key for key in own if key not in given and key not in (optional or ())]
    unexpected = [key for key in given if key not in own and key not in (optional or ())]
    problems = [f"{what} keys: {keys}" for what, keys in (("Missing", missing), ("Unexpected", unexpected)) if keys]
    if problems:
        raise RuntimeError(f"{'; '.join(problems)} in {where}")


def _compare_shapes(given: Any, own: Any, where: str) -> None:
    if tuple(np.shape(given)) != tuple(own.shape):
        raise RuntimeError(f"{where} has shape {list(np.shape(given))}; expected {list(own.shape)}")


@torch.no_grad()
def _load_state(trainer: TrainerState, state: Mapping[str, Any]) -> None:
    """Take over a state that :func:`_check_state` found in order."""
    if trainer._scaler is not None and "loss_scaler" in state:
        # first, for what it refuses is only known when it is asked
        StepScalerRule(trainer._scaler).resume(state["loss_scaler"])
        trainer._skipped = int(state["loss_scaler"]["skipped_steps"])
    for name, value in state.get("model", {}).get("full_precision", {}).items():
        if name in trainer._weights:
            trainer._weights[name].copy_(torch.as_tensor(value))
    trainer._optimizer.load(state.get("optimizer", {}))
    info = state.get("train_step_info", {})
    own = trainer._train_step_info
    own.optimization_step = int(info.get("optimization_step", own.optimization_step))
    own.step = int(info.get("step", own.step))
