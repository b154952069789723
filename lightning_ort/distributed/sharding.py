"""Optimizer states in parts, one per process: stage 1 of ZeRO (Rajbhandari et al., 2020), by torch's own optimizer."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ["local_part", "sharded"]


def sharded(optimizer: Optimizer, schedulers: Iterable[Any] = ()) -> ZeroRedundancyOptimizer:
    """The same optimizer, with the states of this process's part of the parameters.

    Args:
        optimizer: one that has not made a step yet.
        schedulers: those of ``optimizer`` among them are given the new one.

    Raises:
        ValueError: its class takes no parameters and settings as torch's do.
    """
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
    pending = list(schedulers)
    while pending:
        scheduler = pending.pop()
        pending += getattr(scheduler, "_schedulers", ())  # of those that call others
        if getattr(scheduler, "optimizer", None) is optimizer:
            scheduler.optimizer = made
            if isinstance(scheduler, LRScheduler):
                _counted(made)
    return made


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
