"""Optimizer states in parts, one per process: stage 1 of ZeRO (Rajbhandari et al., 2020), by torch's own optimizer."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ["STEP_HOOKS", "local_part", "sharded"]


def sharded(optimizer: Optimizer, schedulers: Iterable[Any] = ()) -> ZeroRedundancyOptimizer:
    """The same optimizer, with the states of this process's part of the parameters.

    Args:
        optimizer: one that has not made a step yet.
        schedulers: those of ``optimizer`` among them are given the new one.

    Raises:
        ValueError: its class takes no parameters and settings as torch's do, its updates are not those of each
            parameter alone, or it has hooks of its state, or a ``step`` that somebody has put in the place of its own.
    """
    _refuse_coupled(optimizer)
    _refuse_changed(optimizer)
    with warnings.catch_warnings():
        # other optimizers of that package are compiled in a way that torch has given up
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    any_name = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    defaults = {k: v for k, v in optimizer.defaults.items() if any_name or k in accepted}
    try:
        made = ZeroRedundancyOptimizer(optimizer.param_groups, kind, **defaults)
    except TypeError as error:
        raise ValueError(
            f"shard_optimizer=True makes a {kind.__name__} per process for a part of the parameters, by "
            f"{kind.__name__}(params, **optimizer.defaults), which fails: {error}"
        ) from error
    for hooks in STEP_HOOKS:  # the same dictionary, from which a user's handle removes them
        setattr(made, hooks, getattr(optimizer, hooks))
    # a method, as schedulers that are made later expect
    made.step = types.MethodType(_evaluated_once(type(made).step, kind.__name__), made)  # type: ignore[method-assign]
    pending = list(schedulers)
    while pending:
        scheduler = pending.pop()
        pending += getattr(scheduler, "_schedulers", ())  # of those that call others
        if getattr(scheduler, "optimizer", None) is optimizer:
            scheduler.optimizer = made
            if isinstance(scheduler, LRScheduler):
                _counted(made)
    return made


# Private: torch tells nobody which hooks an optimizer has.
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""where an optimizer keeps hooks of ``step``"""
_STATE_HOOKS = {
    m: [f"_optimizer_{m}_{time}_hooks" for time in ("pre", "post")] for m in ("state_dict", "load_state_dict")
}


def _refuse_changed(optimizer: Optimizer) -> None:
    """Raise if there is something about ``optimizer`` that another one of its class would not have."""
    name = type(optimizer).__name__
    hooked = [method for method, names in _STATE_HOOKS.items() if any(getattr(optimizer, n) for n in names)]
    if hooked:
        raise ValueError(
            f"shard_optimizer=True, but {name} has hooks of {' and '.join(hooked)}, which would see a part of the "
            "states on each process. Leave shard_optimizer out, or change checkpoints in on_save_checkpoint and "
            "on_load_checkpoint."
        )
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"shard_optimizer=True, but somebody has put another `step` in the place of {name}'s own, which its part "
            "on each process would not have. Leave shard_optimizer out, or write a subclass."
        )


def _refuse_coupled(optimizer: Optimizer) -> None:
    """Raise if the update of a parameter depends on others, which a part of them does not have."""
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            f"shard_optimizer=True, but configure_optimizers returned {name}, whose line search and stopping rules "
            "need all parameters at once, and each process would have a part of them. Leave shard_optimizer out, or "
            "take an optimizer that updates each parameter by itself, such as torch.optim.AdamW."
        )
    if getattr(optimizer, "clips_together", False):  # of this package
        norms = [group["max_norm"] for group in optimizer.param_groups]
        raise ValueError(
            f"shard_optimizer=True, but configure_optimizers returned {name}(max_norm={min(norms)}), which clips by "
            "the norm of all gradients, and each process would take that of its part. Leave max_norm out and clip by "
            "Trainer(gradient_clip_val=...), or leave shard_optimizer out."
        )


def _evaluated_once(step: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``step``, which refuses to compute the loss anew: weights of other parts are not yet what they will be.

    Args:
        step: of an optimizer in parts.
        name: of the class of each part.
    """

    @functools.wraps(step)
    def evaluated_once(self: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if closure is None:
            return step(self, **kwargs)
        evaluated = False

        def once() -> Any:
            nonlocal evaluated
            if evaluated:
                raise ValueError(
                    f"shard_optimizer=True, but a step of {name} computes the loss more than once, while each process "
                    "changes the weights of its own part alone. Leave shard_optimizer out, or take an optimizer that "
                    "needs one loss per step, such as torch.optim.AdamW."
                )
            evaluated = True
            return closure()

        return step(self, closure=once, **kwargs)

    return evaluated_once


def _counted(optimizer: Optimizer) -> None:
    """Have ``step`` tell schedulers that it was called: private, they mark the optimizer that they are made with."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    step = optimizer.step

    @functools.wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(*args, **kwargs)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = counted  # type: ignore[method-assign]


def local_part(optimizer: Any) -> Any:
    """What updates this process's part; ``optimizer`` itself where it has all."""
    module = sys.modules.get("torch.distributed.optim")  # whoever has one has imported it
    is_part = module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)
    return optimizer.optim if is_part else optimizer
