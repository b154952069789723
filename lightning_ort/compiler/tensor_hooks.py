"""Hooks of what a region gives, by which gradients of other outputs pass in eager, and of what it takes.

All outputs of a region are results of one node of autograd: the gradient of a loss does not come by the activations
that the region gives out as well, and a hook there, or ``retain_grad``, would see nothing of it. Where there is one
when gradients arrive, torch computes them, with the hooks at the same places.

All inputs get their gradients at once, and hooks of parameters would be called in the order of the inputs. Where there
are some, gradients go by functions of autograd that pass them on, one by one, in eager's order.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

__all__ = ["WatchedOutput", "active", "attach", "hooked_leaves", "in_order", "watch"]

Hook = Callable[[torch.Tensor], "torch.Tensor | None"]


def _nothing(gradient: torch.Tensor | None) -> None:
    """Called by autograd, which knows a part of the gradient, or none of it."""


class _Hooks(OrderedDict):
    """Where ``Tensor.register_hook`` puts hooks of an output, and whence autograd takes them.

    Args:
        deferred: autograd calls none of them; whoever computes gradients does.
    """

    def __init__(self, *, deferred: bool) -> None:
        super().__init__()
        self._deferred = deferred
        self.registered: dict[int, Hook] = {}

    def __setitem__(self, key: int, hook: Hook) -> None:
        self.registered[key] = hook
        super().__setitem__(key, _nothing if self._deferred else hook)

    def __delitem__(self, key: int) -> None:
        del self.registered[key]
        super().__delitem__(key)


@dataclasses.dataclass(frozen=True)
class WatchedOutput:
    """An output of a run of a region, to which hooks may come.

    Attributes:
        output: number of it.
        hooks: that users have registered since.
        tensor: refers to it weakly.
    """

    output: int
    hooks: _Hooks
    tensor: weakref.ref[torch.Tensor]

    @property
    def is_active(self) -> bool:
        """Whether anybody waits for its gradient."""
        return bool(self.hooks.registered) or self._retaining is not None

    @property
    def _retaining(self) -> torch.Tensor | None:
        tensor = self.tensor()
        return tensor if tensor is not None and tensor.retains_grad else None

    def attach(self, twin: torch.Tensor, arrived: torch.Tensor | None) -> None:
        """Have the gradient that arrives at ``twin``, the output computed again, do what it would at the output.

        Args:
            twin: in a new graph of autograd.
            arrived: what of it has come by the output itself, which ``retain_grad`` has seen.
        """
        for hook in self.hooks.registered.values():
            twin.register_hook(hook)
        retaining = self._retaining
        if retaining is not None:
            before = _without(retaining.grad, arrived)

            def retain(gradient: torch.Tensor) -> None:
                retaining.grad = gradient if before is None else before + gradient

            twin.register_hook(retain)  # the last one, as it is in eager


def _without(total: torch.Tensor | None, part: torch.Tensor | None) -> torch.Tensor | None:
    """What ``total`` was before ``part`` was added to it."""
    if total is None or part is None:
        return total
    return None if torch.equal(total, part) else total - part


def watch(outputs: Sequence[Any], numbers: Collection[int], node: Any) -> list[WatchedOutput]:
    """Be ready for hooks of the ``outputs`` of these ``numbers``, those of ``node`` and of nodes after it."""
    watched = []
    for number in numbers:
        x = outputs[number]
        if isinstance(x, torch.Tensor) and x.grad_fn is not None and x._backward_hooks is None:
            # another node passes on what arrives, and knows nothing of hooks
            is_own = x.grad_fn is node or getattr(x.grad_fn, "step", None) is node
            hooks = _Hooks(deferred=is_own)
            # private: what Tensor.register_hook does with a dictionary of its own, when the first hook comes
            x._backward_hooks = hooks
            x.grad_fn._register_hook_dict(x)
            watched.append(WatchedOutput(number, hooks, weakref.ref(x)))
    return watched


def active(watched: Sequence[WatchedOutput]) -> list[WatchedOutput]:
    """Those for whose gradient anybody waits."""
    return [output for output in watched if output.is_active]


def attach(watched: Sequence[WatchedOutput], twins: Sequence[Any], arrived: Mapping[int, torch.Tensor]) -> None:
    """Hand the hooks of ``watched`` on to ``twins``, all outputs of the region computed again."""
    for output in watched:
        output.attach(twins[output.output], arrived.get(output.output))


def hooked_leaves(inputs: Sequence[Any], wanted: Sequence[int]) -> list[int]:
    """Numbers, among those of the ``wanted`` inputs, of parameters whose gradient somebody waits for."""
    found = [i for i in wanted if (x := inputs[i])._backward_hooks or x._post_accumulate_grad_hooks]
    return [i for i in found if inputs[i].is_leaf]


def in_order(inputs: Sequence[Any], arrivals: Sequence[int]) -> list[Any]:
    """``inputs`` with aliases of the leaves among ``arrivals``, by which gradients come to these in that order.

    Autograd goes on with the function that was made last, and gives a leaf what has come before anything else.
    """
    ends = list(inputs)
    for i in reversed(arrivals):
        if ends[i].is_leaf:
            ends[i] = ends[i].view_as(ends[i])
    return ends
