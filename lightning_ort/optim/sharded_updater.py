"""Updates in parts, one per process: stage 1 of ZeRO (Rajbhandari et al., 2020)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from lightning_ort.distributed.processes import Processes
from lightning_ort.optim.settings import OptimizerSettings
from lightning_ort.optim.updater import Updater
from lightning_ort.runtime.factory import SessionFactory

__all__ = ["ShardedUpdater", "make_updater"]


class ShardedUpdater(Updater):
    """An updater of this process's share of the parameters; those of the others come from them, updated.

    Parameters are not cut: the largest goes to the process that has the least.

    Args:
        settings: as for :class:`~lightning_ort.optim.updater.Updater`, of all parameters.
        params: all parameters, the same in all processes.
        sessions: makes them.
        processes: who else there is.
        guard: change nothing anywhere where a gradient of any parameter is not finite.

    Attributes:
        moments: as of ``Updater``, of the share.
        counts: as of ``Updater``, of the share.
        owners: name of each parameter to the rank that updates it.
    """

    def __init__(
        self,
        settings: Mapping[str, OptimizerSettings],
        params: Mapping[str, Tensor],
        sessions: SessionFactory,
        processes: Processes,
        *,
        guard: bool,
    ) -> None:
        self._processes, self._everyones = processes, dict(params)
        self._limit_of = {name: settings[name].clip_grad_norm for name in params}
        self._guards = guard
        self.owners = _owners(params, processes.world_size)
        mine = {name: p for name, p in params.items() if self.owners[name] == processes.rank}
        # norms and what is finite are found out here, of the gradients of all parameters
        unclipped = {name: dataclasses.replace(settings[name], clip_grad_norm=None) for name in mine}
        super().__init__(unclipped, mine, sessions)

    @override
    def step(self, gradients: Mapping[str, Tensor], lr: float, *, scale: float = 1.0) -> bool:
        """Update all parameters that have a gradient, each in one process.

        Args:
            gradients: name to gradient, the same bits in all processes; may be overwritten.
            lr: learning rate.
            scale: what the gradients are multiplied with.

        Returns:
            As of :meth:`Updater.step`; the same in all processes.

        Raises:
            RankError: another process has failed or ended.
        """
        if not self._prepared(gradients, scale):
            return False
        super().step({name: g for name, g in gradients.items() if name in self._params}, lr, scale=scale)
        for rank in range(self._processes.world_size):
            updated = [self._everyones[name] for name in gradients if self.owners[name] == rank]
            self._processes.broadcast(updated, rank)
        return True

    def _prepared(self, gradients: Mapping[str, Tensor], scale: float) -> bool:
        """Whether gradients may be applied; they are clipped, as the graph of an update would."""
        clips = any(limit is not None for limit in self._limit_of.values())
        if not gradients or not (clips or self._guards):
            return True
        wide = torch.float64 if any(g.dtype == torch.float64 for g in gradients.values()) else torch.float32
        flat = [g.flatten() for g in gradients.values()]
        total = float(torch.stack([g.dot(g).to(wide) for g in flat]).sum())
        if self._guards and not math.isfinite(total):
            return False
        norm = total**0.5 * scale
        for name, gradient in gradients.items():
            limit = self._limit_of[name]
            if limit is not None and norm > limit and name in self._params:
                gradient.mul_(limit / norm)
        return True


def _owners(params: Mapping[str, Tensor], world_size: int) -> dict[str, int]:
    sizes = {name: p.numel() * p.element_size() for name, p in params.items()}
    held = [0] * world_size
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owners[name] = held.index(min(held))
        held[owners[name]] += sizes[name]
    return owners


def make_updater(
    settings: Mapping[str, OptimizerSettings],
    params: Mapping[str, Tensor],
    sessions: SessionFactory,
    *,
    guard: bool,
    share: Processes | None,
) -> Updater:
    """Make the updater of a trainer: of all parameters, or of what falls to this process if states are shared out."""
    if share is None:
        return Updater(settings, params, sessions, guard=guard)
    return ShardedUpdater(settings, params, sessions, share, guard=guard)
