"""The first update by a graph beside torch's."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ort.errors import MismatchError
from lightning_ort.optim.torch_optim.members import Member
from lightning_ort.verification import UPDATE, UPDATE_ROUNDING, distance, largest

__all__ = ["FirstUpdate", "allowed"]

_COUNTERS = "step", "mu_product"
"""what torch's optimizers call them; the second one is NAdam's"""


class FirstUpdate:
    """Has torch make the coming update on copies, to compare with what ONNX Runtime makes of the originals.

    Args:
        optimizer: before the update.
        members: the parameters that are going to be changed.
    """

    def __init__(self, optimizer: Optimizer, members: Sequence[Member]) -> None:
        self._optimizer, self._members = optimizer, list(members)
        self._fresh = [m.fresh is not None for m in members]
        self._before = [[t.clone() for t in _tensors(m)] for m in members]
        self._expected = self._updated(None)

    def compare(self) -> None:
        """
        Raises:
            MismatchError: the optimizer is not as torch would have left it; it has been put back.
        """
        exact: list[list[Tensor]] | None = None
        for k, (m, before, expected) in enumerate(zip(self._members, self._before, self._expected, strict=True)):
            for n, (got, old, wanted) in enumerate(zip(_tensors(m), before, expected, strict=True)):
                # a weight is judged by its change, which may be tiny beside it
                scale = wanted - old if n == 0 else wanted
                off, most = distance(got, wanted), allowed(wanted, scale)
                if off <= most:
                    continue
                exact = exact or self._updated(torch.float64)
                theirs, ours = distance(wanted.double(), exact[k][n]), distance(got.double(), exact[k][n])
                if ours <= UPDATE_ROUNDING * theirs:
                    continue
                self._restore()
                what = "the new value" if n == 0 else f"state {(*m.names, *_COUNTERS)[n - 1]!r}"
                raise MismatchError(
                    f"{type(self._optimizer).__name__}: {what} of {self._name(m)} differs between ONNX Runtime and "
                    f"torch: largest difference {off:.3g}, allowed {most:.3g}. Nothing was updated. Please report "
                    "it; ORTStrategy(optimizer='torch') lets torch make the updates, verify=False skips this check."
                )

    def _updated(self, dtype: torch.dtype | None) -> list[list[Tensor]]:
        """What torch makes of each member, in the order of :func:`_tensors`; computed in ``dtype``."""
        twin = copy.deepcopy(self._optimizer)
        copies = {
            id(p): q
            for group, other in zip(self._optimizer.param_groups, twin.param_groups, strict=True)
            for p, q in zip(group["params"], other["params"], strict=True)
        }
        for q in copies.values():
            q.grad = None
        for m, before, fresh in zip(self._members, self._before, self._fresh, strict=True):
            q, gradient = copies[id(m.param)], m.param.grad
            assert gradient is not None
            q.data = before[0].to(dtype or q.dtype, copy=True)
            q.grad = gradient.to(q.dtype)
            if fresh:
                twin.state.pop(q, None)
                continue
            for name, value in zip(m.names, before[1:], strict=False):
                twin.state[q][name] = value.to(q.dtype, copy=True)
            for name, value in zip(_counter_names(m, twin.state[q]), before[1 + len(m.names) :], strict=True):
                twin.state[q][name] = value.clone()
        # past the hooks that users have registered for all optimizers
        step = type(twin).step
        getattr(step, "__wrapped__", step)(twin)
        found = []
        for m in self._members:
            q = copies[id(m.param)]
            state: Any = twin.state.get(q, {})
            counters = [state[name] for name in _counter_names(m, state)]
            found.append([q.detach(), *[state[name] for name in m.names], *counters])
        return found

    def _restore(self) -> None:
        for m, before, fresh in zip(self._members, self._before, self._fresh, strict=True):
            for tensor, old in zip(_tensors(m), before, strict=True):
                tensor.copy_(old)
            if fresh:
                self._optimizer.state.pop(m.param, None)

    def _name(self, member: Member) -> str:
        group = self._optimizer.param_groups[member.group]
        position = next(i for i, p in enumerate(group["params"]) if p is member.param)
        named = group.get("param_names")
        shape = tuple(member.param.shape)
        return named[position] if named else f"parameter {position} of group {member.group}, shaped {shape},"


def _tensors(member: Member) -> Iterator[Tensor]:
    yield member.param.detach()
    yield from member.states
    yield from member.counters


def _counter_names(member: Member, state: Any) -> list[str]:
    return [name for name in _COUNTERS if name in state][: len(member.counters)]


def allowed(wanted: Tensor, scale: Tensor) -> float:
    """How far from ``wanted`` an update may end for a reason of rounding, where the change is of the size ``scale``."""
    return UPDATE[wanted.dtype] * largest(scale) + 4 * torch.finfo(wanted.dtype).eps * largest(wanted)
