"""Loading a checkpoint into a Trainer, or leaving the Trainer as it was."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ort.checkpoints.conversion import Translation
from lightning_ort.checkpoints.lightning import RECORD, TrainerFile, parameter_names
from lightning_ort.errors import CheckpointError
from lightning_ort.lightning_packages import everywhere, pl, rank_zero_warn
from lightning_ort.validation import listed

__all__ = ["Restoring"]

# how torch executes an update; a state without them loads all the same
_EXECUTION = {"foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay"}

# states that have the shape of their parameter
_SHAPED = ("exp_", "max_exp_", "momentum", "square_avg")


class Restoring:
    """One load of a checkpoint, from reading it to the first step.

    Lightning loads weights and callbacks before there are optimizers that the rest could be compared with. So what was
    is kept until the first step, and put back if anything fails before that.

    Args:
        module: the LightningModule; its trainer is asked for the rest.
        checkpoint: what was read.
        weights_only: see ``torch.load``.

    Raises:
        CheckpointError: a file of an ORTTrainer does not fit the module.

    Attributes:
        checkpoint: what Lightning is to load.
    """

    def __init__(self, module: pl.LightningModule, checkpoint: dict[str, Any], weights_only: bool | None) -> None:
        self._trainer, self._module = module.trainer, module
        self._translation: Translation | None = None
        self.checkpoint = checkpoint
        if isinstance(checkpoint, TrainerFile):
            self._translation = Translation(checkpoint, module, weights_only)
            self.checkpoint = self._translation.checkpoint
        self._tensors = {n: t.clone() for n, t in module.state_dict().items() if isinstance(t, Tensor)}
        trainer: Any = self._trainer  # Lightning sets these two where type checkers do not look
        stateful = [*trainer.callbacks, trainer.precision_plugin]
        if trainer.datamodule is not None:
            stateful.append(trainer.datamodule)
        self._states: list[tuple[Any, Any]] = []
        for part in stateful:
            with contextlib.suppress(Exception):  # some have no state before they have been used
                self._states.append((part, copy.deepcopy(part.state_dict())))
        self._loops = copy.deepcopy(self._trainer.fit_loop.state_dict())

    def complete(self, optimizers: Sequence[Optimizer]) -> None:
        """Call when optimizers have been made, before Lightning loads their states.

        Raises:
            CheckpointError: a file of an ORTTrainer is of another optimizer.
        """
        if self._translation is not None:
            self._translation.complete(self._trainer, optimizers)

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Compare the optimizer states that Lightning is about to load.

        Where the file tells the names of parameters, each gets the state of its own, in whatever order they are now.

        Raises:
            CheckpointError: their number, class, groups or shapes are others. None at all is a warning.
        """
        saved = self.checkpoint["optimizer_states"]
        if not saved and optimizers:
            rank_zero_warn("The checkpoint has no states of optimizers: they begin anew.")
            return
        if len(saved) != len(optimizers):
            raise CheckpointError(
                f"the checkpoint has states of {len(saved)} optimizers, but configure_optimizers returned "
                f"{len(optimizers)}."
            )
        described = self.checkpoint.get(RECORD, {}).get("optimizers", [{}] * len(saved))
        for i, (optimizer, of_file) in enumerate(zip(optimizers, described, strict=True)):
            names = parameter_names(optimizer, self._module)
            saved[i], problem = _in_order(saved[i], of_file.get("names", names), names)
            problem = problem or _mismatch(optimizer, saved[i])
            if problem:
                raise CheckpointError(
                    f"the checkpoint's optimizer state is not that of {type(optimizer).__name__}: {problem}. Use the "
                    "optimizer that the checkpoint was written with; to begin with its weights alone, "
                    "load_from_checkpoint."
                )

    def advance(self) -> None:
        """Call when optimizer states have been loaded."""
        if self._translation is not None:
            self._translation.advance(self._trainer)

    @torch.no_grad()
    def undo(self) -> None:
        """Put module, callbacks, data module, precision plug-in and loops back."""
        # Lightning would load what it still holds at the next fit, even if that is given no checkpoint
        self.checkpoint.clear()
        for name, tensor in self._module.state_dict().items():
            if name in self._tensors:
                tensor.copy_(self._tensors[name])
        for part, state in self._states:
            if state:
                part.load_state_dict(state)
        if self._trainer.fit_loop.state_dict() != self._loops:
            self._trainer.fit_loop.load_state_dict(self._loops)
            _not_restarting(self._trainer.fit_loop)


def _not_restarting(loop: Any) -> None:
    """Loops that were loaded with a state take the next run for its continuation, and have no public way out of it."""
    for child in vars(loop).values():
        if isinstance(child, everywhere("loops.loop:_Loop")):
            _not_restarting(child)
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False


def _in_order(saved: Mapping[str, Any], names: Sequence[str], own: Sequence[str]) -> tuple[Mapping[str, Any], str]:
    """A state for parameters that are named ``own``, of one for ``names``, and what is wrong with it."""
    if list(names) == list(own) or sorted(names) != sorted(own) or "" in own:  # torch's order is all that is known
        return saved, ""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    number_of = dict(zip(names, numbers, strict=True))
    start = 0
    for i, group in enumerate(saved["param_groups"]):
        end = start + len(group["params"])
        if strangers := set(own[start:end]) - set(names[start:end]):
            return saved, f"its group {i} has {listed(names[start:end])}, and not {listed(sorted(strangers))}"
        start = end
    found = {number: saved["state"][number_of[name]] for number, name in zip(numbers, own, strict=True)
             if number_of[name] in saved["state"]}  # fmt: skip
    return {**saved, "state": found}, ""


def _mismatch(optimizer: Optimizer, saved: Mapping[str, Any]) -> str:
    own = optimizer.param_groups
    groups = saved.get("param_groups", [])
    sizes = [len(group["params"]) for group in groups]
    if sizes != [len(group["params"]) for group in own]:
        return f"its groups have {sizes} parameters, expected {[len(group['params']) for group in own]}"
    for group in groups:
        lacking = [key for key in optimizer.defaults if key not in group and key not in _EXECUTION]
        if lacking:
            return f"it has no {', '.join(lacking)}, but {', '.join(k for k in group if k != 'params')}"
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in enumerate(params):
        for key, value in saved.get("state", {}).get(i, {}).items():
            # numbers, such as the step, are tensors without dimensions
            shaped = isinstance(value, Tensor) and value.dim() and key.startswith(_SHAPED)
            if shaped and value.shape != p.shape:
                return f"{key} of parameter {i} is {list(value.shape)}, expected {list(p.shape)}"
    return ""
