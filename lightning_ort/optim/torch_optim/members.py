"""The parameters that one update changes, with their states, and why a parameter cannot be among them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ort.optim.rules import Rule
from lightning_ort.optim.torch_optim.families import Family, Group

__all__ = ["Member", "Members", "NeedsTorch", "is_plain"]

_TYPES = (torch.float32, torch.float64)


def is_plain(tensor: Tensor) -> bool:
    """Whether it is dense, of float32 or float64, as its memory has it, and of no class of its own."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.dtype in _TYPES and not tensor.is_neg()


class NeedsTorch(Exception):
    """Why torch has to make an update; nothing has been changed."""


@dataclasses.dataclass(eq=False)
class Member:
    """A parameter with its states.

    Attributes:
        param: the parameter.
        group: number of its group.
        names: torch's names of the states.
        states: tensors of the rule, in its order.
        counters: states that are single numbers.
        fresh: states that are still to be entered into the optimizer; ``None`` if they are there.
    """

    param: Tensor
    group: int
    names: tuple[str, ...]
    states: tuple[Tensor, ...]
    counters: tuple[Tensor, ...]
    fresh: dict[str, Tensor] | None
    form: tuple[Any, ...] = ()

    def holds(
        self, group: int, names: tuple[str, ...], state: dict[str, Any] | None, counters: tuple[str, ...]
    ) -> bool:
        """Whether everything is as it was: neither states nor memory replaced, nor moved to another group."""
        if self.fresh is not None or group != self.group or names != self.names:
            return False
        if state is None:
            return not names and not counters and self.form == _form(self.param)
        if any(state.get(name) is not t for name, t in zip(names, self.states, strict=True)):
            return False
        if any(state.get(name) is not t for name, t in zip(counters, self.counters, strict=True)):
            return False
        return self.form == _form(self.param)


class Members:
    """Finds the members of each update of ``optimizer``.

    Args:
        optimizer: a torch optimizer.
        family: what is known of its class.
    """

    def __init__(self, optimizer: Optimizer, family: Family) -> None:
        self._optimizer, self._family = optimizer, family
        self._known: dict[int, Member] = {}

    def find(self, rules: list[Rule]) -> tuple[list[Member], list[Tensor]]:
        """All parameters that have a gradient, and the gradients.

        Args:
            rules: one per group.

        Raises:
            NeedsTorch: one of them cannot be updated in ONNX Runtime.
        """
        family, state = self._family, self._optimizer.state
        members: list[Member] = []
        gradients: list[Tensor] = []
        for number, (group, rule) in enumerate(zip(self._optimizer.param_groups, rules, strict=True)):
            names = family.names(rule)
            for p in group["params"]:
                gradient = p.grad
                if gradient is None:
                    continue
                member = self._known.get(id(p))
                if member is None or not member.holds(number, names, state.get(p), family.counters):
                    member = self._known[id(p)] = self._member(p, number, group, names)
                if (
                    gradient.layout is not torch.strided
                    or gradient.dtype is not p.dtype
                    or type(gradient) is not Tensor
                ):
                    raise NeedsTorch(f"a gradient is {_describe(gradient)}, its parameter {_describe(p)}")
                if gradient.is_neg():
                    gradient = gradient.resolve_neg()
                members.append(member)
                gradients.append(gradient)
        if len({id(m) for m in members}) != len(members):
            raise NeedsTorch("a parameter occurs twice")
        counters = [id(counter) for m in members for counter in m.counters]
        if len(set(counters)) != len(counters):
            raise NeedsTorch("two parameters are counted by one tensor")
        return members, gradients

    def _member(self, p: Tensor, number: int, group: Group, names: tuple[str, ...]) -> Member:
        if not is_plain(p):
            raise NeedsTorch(f"a parameter is {_describe(p)}; ONNX Runtime updates dense ones of float32 and float64")
        state, family = self._optimizer.state.get(p) or {}, self._family
        fresh = None
        # torch's own test; SGD makes its buffer whenever it is missing
        missing = any(state.get(name) is None for name in names) if not family.counters else not state
        if missing:
            state = fresh = family.initial(p, group, names, self._optimizer.defaults)
        for name in (*family.counters, *names):
            value = state.get(name)
            if not isinstance(value, Tensor):
                raise NeedsTorch(f"state {name!r} of a parameter is {value!r}")
            if name in family.counters:
                fits = value.numel() == 1 and value.is_floating_point()
            else:
                fits = _form(value)[:3] == _form(p)[:3] and value.layout is torch.strided and type(value) is Tensor
            if not fits:
                raise NeedsTorch(f"state {name!r} of a parameter of {_describe(p)} is {_describe(value)}")
        return Member(
            p,
            number,
            names,
            tuple(state[name] for name in names),
            tuple(state[name] for name in family.counters),
            fresh,
            _form(p),
        )

    def enter(self, member: Member) -> None:
        """Make the states of a new member known to the optimizer."""
        if member.fresh is not None:
            self._optimizer.state[member.param].update(member.fresh)
            member.fresh = None

    def forget(self) -> None:
        """Forget what has not become known to the optimizer."""
        self._known = {key: member for key, member in self._known.items() if member.fresh is None}


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_neg()


def _describe(tensor: Tensor) -> str:
    kind = "" if type(tensor) in (Tensor, nn.Parameter) else f"{type(tensor).__name__}, "
    layout = "" if tensor.layout is torch.strided else f"{tensor.layout}, "
    layout += "with the sign of all reversed, " if tensor.layout is torch.strided and tensor.is_neg() else ""
    return f"{kind}{layout}{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
