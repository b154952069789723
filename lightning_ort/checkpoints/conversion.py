"""A file of an ORTTrainer as a Lightning checkpoint, and the way back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ort.checkpoints.lightning import RECORD, TRAINER_SCALER, first_names, unpack, weights_key
from lightning_ort.checkpoints.names import find_prefix, from_moments, orttrainer_kind_of, to_moments, without_moments
from lightning_ort.checkpoints.progress import Position, advance_schedulers, loops_at
from lightning_ort.errors import CheckpointError
from lightning_ort.lightning_packages import pl, rank_zero_info
from lightning_ort.validation import listed

if TYPE_CHECKING:
    from lightning_ort.checkpoints.lightning import TrainerFile

__all__ = ["Translation", "to_trainer"]


class Translation:
    """One file of an ORTTrainer on its way into a Lightning run.

    Weights come first (:attr:`checkpoint`), before Lightning asks for optimizers; what depends on these follows
    (:meth:`complete`, :meth:`advance`).

    Args:
        file: what was read.
        module: the LightningModule that it is for.
        weights_only: see ``torch.load``; for what Lightning had put into the file.

    Raises:
        CheckpointError: the file has no weights, or their names or shapes do not fit.

    Attributes:
        checkpoint: Lightning's dictionary.
    """

    def __init__(self, file: TrainerFile, module: pl.LightningModule, weights_only: bool | None) -> None:
        self._path, self._state, self._module = file.path, file.state, module
        self._refuse_part()
        rest = self._rest(weights_only)
        self._record: Mapping[str, Any] = rest.pop(RECORD, {})
        weights = self._section("model", "full_precision")
        info = self._section("train_step_info")
        own = {n: t for n, t in module.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
        prefix = file.prefix if file.prefix is not None else self._record.get("prefix")
        if prefix is not None and not all(prefix + name in own for name in weights):
            prefix = file.prefix
        self._prefix = find_prefix(list(weights), list(own), prefix, f"{self._path} and {type(module).__name__}")
        scaler = self._state.get("loss_scaler")
        skipped = 0 if scaler is None else int(scaler["skipped_steps"])
        self._counts = int(info["step"]), int(info["optimization_step"]) + skipped
        self.checkpoint: dict[str, Any] = {
            "epoch": 0,
            **rest,
            "global_step": self._counts[1],
            "pytorch-lightning_version": rest.get("pytorch-lightning_version", pl.__version__),
        }
        key = weights_key(rest)
        self.checkpoint[key] = {**rest.get(key, {}), **self._weights(weights, own)}
        if scaler is not None:
            self.checkpoint.pop(type(module.trainer.precision_plugin).__qualname__, None)
            self.checkpoint[TRAINER_SCALER] = scaler
        rank_zero_info(
            f"{self._path}: {len(weights)} weights of an ORTTrainer are those of {type(module).__name__}"
            + (f", where their names begin with {self._prefix!r}." if self._prefix else ", by the same names.")
        )

    def _refuse_part(self) -> None:
        options = self._state["trainer_options"]
        if int(options.get("zero_stage", 0)) and int(options.get("world_size", 1)) > 1:
            raise CheckpointError(
                f"{self._path} holds the optimizer's states of rank {options.get('world_rank')} of "
                f"{options['world_size']} only (stage 1 of ZeRO). Load the files of all ranks into an ORTTrainer of "
                "one process, and save one file."
            )

    def _rest(self, weights_only: bool | None) -> dict[str, Any]:
        """What was in the Lightning checkpoint that the ORTTrainer had gone on from."""
        # it brings h5py, and a Lightning checkpoint needs none
        from lightning_ort.checkpoints.orttrainer import LIGHTNING

        if LIGHTNING not in self._state:
            return {}
        return unpack(self._state[LIGHTNING], self._path, weights_only)

    def _section(self, *keys: str) -> Mapping[str, Any]:
        found: Any = self._state
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            raise CheckpointError(f"{self._path} holds no {'/'.join(keys)}, as every checkpoint of an ORTTrainer does.")
        return found

    def _weights(self, given: Mapping[str, Any], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {self._prefix + name: torch.as_tensor(value) for name, value in given.items()}
        wrong = [
            f"{name} is {list(tensor.shape)}, expected {list(own[name].shape)}"
            for name, tensor in found.items()
            if tensor.shape != own[name].shape
        ]
        if wrong:
            raise CheckpointError(
                f"{self._path} is of another network than {type(self._module).__name__}: {'; '.join(wrong)}."
            )
        found = {name: tensor.to(own[name].dtype) for name, tensor in found.items()}
        # an ORTTrainer has a tensor of several names once
        return found | {name: found[first] for name, first in first_names(self._module).items() if first in found}

    def complete(self, trainer: pl.Trainer, optimizers: Sequence[Optimizer]) -> None:
        """Put what fit needs into :attr:`checkpoint`: optimizer states, schedulers, loops.

        Raises:
            CheckpointError: the optimizers are of another kind than the file's, or have other weights; it has no
                optimizer states.
        """
        moments = self._state.get("optimizer")
        if moments is None:
            raise CheckpointError(
                f"{self._path} was written without optimizer states, so that fit cannot go on from it. To begin with "
                "its weights: trainer.validate(model, ckpt_path=...), then trainer.fit(model)."
            )
        saved = self.checkpoint.get("optimizer_states")
        if saved is not None and len(saved) != len(optimizers):
            raise CheckpointError(
                f"{self._path} is of a run with {len(saved)} optimizers, but configure_optimizers returned "
                f"{len(optimizers)}."
            )
        placed: set[str] = set()
        states = []
        for number, optimizer in enumerate(optimizers):
            states.append(self._optimizer_state(optimizer, moments, saved[number] if saved else None, placed))
        surplus = [n for n in moments if n != "shared_optimizer_state" and n not in placed]
        if surplus:
            raise CheckpointError(
                f"{self._path} has optimizer states of {listed(surplus)}, "
                "which are in no optimizer of configure_optimizers."
            )
        self.checkpoint["optimizer_states"] = states
        self._begin, self._end = self._positions(trainer)
        self.checkpoint.setdefault("lr_schedulers", [])
        if self._begin != self._end or "loops" not in self.checkpoint:
            loops = self.checkpoint.get("loops", {})
            fit_loop = loops_at(
                loops.get("fit_loop") or trainer.fit_loop.state_dict(),
                self._end,
                accumulate=trainer.accumulate_grad_batches,
                manual=not self._module.automatic_optimization,
            )
            self.checkpoint["loops"] = {**loops, "fit_loop": fit_loop}
            self.checkpoint["epoch"] = self._end.epoch

    def _optimizer_state(
        self, optimizer: Optimizer, moments: Mapping[str, Any], saved: Mapping[str, Any] | None, placed: set[str]
    ) -> dict[str, Any]:
        own = optimizer.state_dict()
        names = self._names(optimizer)
        inside = {i: n for i, n in enumerate(names) if n in self._section("model", "full_precision")}
        expected = str(self._section("trainer_options").get("optimizer_name"))
        kind, problem = orttrainer_kind_of(optimizer)
        if inside and kind != expected:
            raise CheckpointError(
                f"{self._path} is of {expected}, but configure_optimizers returned {type(optimizer).__name__}"
                + (f" ({problem})." if problem else ".")
            )
        groups = own["param_groups"] if saved is None else saved["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in own["param_groups"]]:
            raise CheckpointError(
                f"{self._path}: the groups of {type(optimizer).__name__} had "
                f"{[len(g['params']) for g in groups]} parameters, and have "
                f"{[len(g['params']) for g in own['param_groups']]}."
            )
        state: dict[int, Any] = {} if saved is None else {i: dict(s) for i, s in saved["state"].items() if s}
        for i, name in inside.items():
            placed.add(name)
            found = from_moments(moments, name) if expected != "SGDOptimizer" else {}
            if found:
                state[i] = {**found, **state.get(i, {})}
        return {**own, "state": state, "param_groups": groups}

    def _names(self, optimizer: Optimizer) -> list[str]:
        """Per parameter of ``optimizer`` what the file calls it."""
        shared = first_names(self._module)
        name_of = {id(p): name for name, p in self._module.named_parameters()}
        alias = {}
        for name in [*shared, *name_of.values()]:
            if name.startswith(self._prefix):
                alias[shared.get(name, name)] = name[len(self._prefix) :]
        params = dict.fromkeys(id(p) for group in optimizer.param_groups for p in group["params"])
        return [alias.get(name_of.get(i, ""), "") for i in params]

    def _positions(self, trainer: pl.Trainer) -> tuple[Position, Position]:
        """Where Lightning had stopped, and where the ORTTrainer has."""
        if self._record:
            per_epoch = self._record["batches_per_epoch"]
            info = self._record["train_step_info"]
            scaler = self._record["loss_scaler"]
            skipped = 0 if scaler is None else scaler["skipped_steps"]
            begin = Position(info["step"], info["optimization_step"] + skipped, per_epoch)
        else:
            # also done by Trainer.estimated_stepping_batches; fit does not do it again
            trainer.fit_loop.setup_data()
            batches = trainer.num_training_batches
            per_epoch = int(batches) if isinstance(batches, int) else None
            begin = Position(0, 0, per_epoch)
        return begin, Position(*self._counts, per_epoch)

    def advance(self, trainer: pl.Trainer) -> None:
        """Bring the schedulers to where the ORTTrainer has stopped; call when the optimizers have been loaded."""
        if self._begin == self._end:
            return
        for config, state in zip(trainer.lr_scheduler_configs, self.checkpoint["lr_schedulers"], strict=False):
            config.scheduler.load_state_dict(state)
        advance_schedulers(trainer, self._begin, self._end)
        # Lightning loads these next
        self.checkpoint["lr_schedulers"] = []


def to_trainer(
    checkpoint: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    trained: Collection[str],
    prefix: str | None,
    path: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """State of an ORTTrainer, and what else the checkpoint holds.

    Args:
        checkpoint: of a run under ``strategy="ort"``.
        weights: the trainer's, by name.
        trained: names of those that it trains.
        prefix: see :func:`find_prefix`.
        path: of the file, for messages.

    Returns:
        The state, as of :mod:`lightning_ort.trainer.state`. The rest, which is the checkpoint without the weights and
        moments that are in the state; its record has the ``prefix`` besides.

    Raises:
        CheckpointError: names do not fit, or its optimizer has no counterpart.
    """
    record = checkpoint.get(RECORD)
    if record is None:
        raise CheckpointError(
            f"{path} was not written under strategy='ort' (it lacks {RECORD!r}), so that nothing tells which of its "
            "optimizer states belongs to which weight. Resume it once with Trainer(strategy='ort') and save it again; "
            "or take the weights alone: model.load_state_dict(torch.load(...)['state_dict'])."
        )
    key = weights_key(checkpoint)
    given = checkpoint[key]
    prefix = find_prefix(list(weights), list(given), prefix, f"{path} and this ORTTrainer")
    # further names of a tensor are no entries of their own, unless the trainer knows the tensor by one of them
    inner = {name[len(prefix) :]: name for name in given if name.startswith(prefix)}
    inner = {n: name for n, name in inner.items() if n in weights or name not in record["shared"]}
    state: dict[str, Any] = {
        "model": {"full_precision": {n: given[name] for n, name in inner.items()}},
        "train_step_info": dict(record["train_step_info"]),
        "trainer_options": {"world_size": 1, "zero_stage": 0},
    }
    if record["loss_scaler"] is not None:
        state["loss_scaler"] = record["loss_scaler"]
    rest = {k: v for k, v in checkpoint.items() if k != key}
    rest[key] = {name: value for name, value in given.items() if name not in inner.values()}
    rest[RECORD] = {**record, "prefix": prefix}
    if "optimizer_states" in checkpoint:
        trainer_names = {record["shared"].get(name, name): n for n, name in inner.items() if n in weights}
        rest["optimizer_states"] = _take_moments(checkpoint, record, trainer_names, weights, trained, state, path)
    return state, rest


def _take_moments(
    checkpoint: Mapping[str, Any],
    record: Mapping[str, Any],
    trainer_names: Mapping[str, str],
    weights: Mapping[str, Tensor],
    trained: Collection[str],
    state: dict[str, Any],
    path: Any,
) -> list[Any]:
    """Fill in the optimizer's part of ``state``; what stays of the checkpoint's optimizer states."""
    kinds: list[str] = []
    states: dict[str, Any] = {}
    left: list[Any] = []
    for optimizer, own in zip(checkpoint["optimizer_states"], record["optimizers"], strict=True):
        taken = {i: trainer_names[name] for i, name in enumerate(own["names"]) if name in trainer_names}
        if not taken:
            left.append(optimizer)
            continue
        if not own["kind"]:
            raise CheckpointError(
                f"{path}: its optimizer cannot be that of an ORTTrainer: {own['problem']}. To take the weights alone: "
                "model.load_state_dict(torch.load(...)['state_dict'])."
            )
        kinds.append(own["kind"])
        # frozen weights may be in the optimizer, but an ORTTrainer has no state for them
        states |= {
            n: optimizer["state"].get(i, {}) for i, n in taken.items() if n in trained or i in optimizer["state"]
        }
        kept = {i: without_moments(s) if i in taken else s for i, s in optimizer["state"].items()}
        left.append({**optimizer, "state": kept})
    if len(set(kinds)) > 1:
        raise CheckpointError(f"{path}: the weights of this ORTTrainer have several optimizers: {', '.join(kinds)}.")
    if kinds:
        state["trainer_options"]["optimizer_name"] = kinds[0]
        try:
            state["optimizer"] = to_moments(kinds[0], states, weights)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
    return left
