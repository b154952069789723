"""What the strategy adds to a Lightning checkpoint, for ORTTrainer to go on from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ort.checkpoints.moments import kind_of

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["RECORD", "TRAINER_SCALER", "first_names", "make_record", "weights_key"]

RECORD = "lightning_ort"
TRAINER_SCALER = "lightning_ort.loss_scaler"
"""Where a checkpoint made of an ORTTrainer's file has its scaler, as of :meth:`ScaleRule.summary`."""


def make_record(trainer: pl.Trainer, module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Plain numbers and strings.

    Returns:
        ``version``; ``shared``, names of weights to the first name of the same tensor; ``optimizers``, each with
        ``kind`` and ``problem`` (see :func:`kind_of`), ``class`` and ``names`` (of its parameters, in the order of
        torch's numbers); ``train_step_info``, the counters of an ORTTrainer; ``batches_per_epoch``, ``None`` if
        unknown; ``loss_scaler`` (see :meth:`ScaleRule.summary`), ``None`` without loss scaling.
    """
    precision = trainer.precision_plugin
    skipped = int(getattr(precision, "skipped_steps", 0))
    batches = trainer.num_training_batches
    progress = trainer.fit_loop.state_dict()["epoch_loop.batch_progress"]
    return {
        "version": 1,
        "shared": first_names(module),
        "optimizers": [_optimizer(optimizer, module) for optimizer in optimizers],
        "train_step_info": {
            "step": progress["total"]["processed"],
            "optimization_step": trainer.global_step - skipped,
        },
        "batches_per_epoch": int(batches) if isinstance(batches, int) else None,
        "loss_scaler": precision.scaler_summary() if hasattr(precision, "scaler_summary") else None,
    }


def _optimizer(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    name_of = {id(p): name for name, p in module.named_parameters()}
    kind, problem = kind_of(optimizer)
    # torch numbers them in this order, each once
    params = list(dict.fromkeys(id(p) for group in optimizer.param_groups for p in group["params"]))
    return {
        "class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "kind": kind,
        "problem": problem,
        "names": [name_of.get(i, "") for i in params],
    }


def first_names(module: nn.Module) -> dict[str, str]:
    """Of tensors with several names: each further one to the first."""
    first: dict[int, str] = {}
    found = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and first.setdefault(id(tensor), name) != name:
            found[name] = first[id(tensor)]
    return found


def weights_key(checkpoint: Mapping[str, Any]) -> str:
    """Under which key the weights are that training goes on with; ``WeightAveraging`` puts its averages first."""
    return "current_model_state" if "current_model_state" in checkpoint else "state_dict"
