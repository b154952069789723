"""One torch optimizer whose updates ONNX Runtime makes."""

from __future__ import annotations

import dataclasses
import math
import operator
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ort.optim.kinds import known_class
from lightning_ort.optim.rules import Rule
from lightning_ort.optim.torch_optim.families import FAMILIES, Group
from lightning_ort.optim.torch_optim.first_update import FirstUpdate
from lightning_ort.optim.torch_optim.members import Member, Members, NeedsTorch
from lightning_ort.optim.update import Update
from lightning_ort.report import timeline
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.runtime.factory import SessionFactory

__all__ = ["OptimizerStepper", "why_not"]

_MOST_GRAPHS = 16
"""Graphs per optimizer. One more belongs to each new set of parameters that have a gradient, or have had other numbers
of updates; where that changes all the time, as with experts chosen at random, compiling would never end."""


class _Class(NamedTuple):
    """Parameters that share their coefficients: of one group and type, with as many updates behind them."""

    group: int
    dtype: torch.dtype
    counters: tuple[float, ...]
    first: bool


@dataclasses.dataclass
class _Plan:
    """An update graph and the members it is bound to."""

    update: Update
    members: list[Member]
    numbers: list[int]
    clip: bool
    checked: bool = False

    def is_for(self, members: Sequence[Member]) -> bool:
        """Whether these are the members."""
        return len(self.members) == len(members) and all(map(operator.is_, self.members, members))


def why_not(optimizer: Optimizer) -> str | None:
    """Why no update of ``optimizer`` can be made in ONNX Runtime; ``None`` if some can."""
    kind = type(optimizer)
    if known_class(optimizer) not in FAMILIES:
        known = ", ".join(dict.fromkeys(k.__name__ for k in FAMILIES))
        return (
            f"{kind.__module__}.{kind.__name__} is not known to lightning_ort, which has {known} (and subclasses "
            "that override neither their step nor what it calls)"
        )
    return None


class OptimizerStepper:
    """Makes the updates of ``optimizer`` in ONNX Runtime, on its own states.

    Args:
        optimizer: of a class that :func:`why_not` accepts.
        config: how sessions are made.
        verify: compare the first update of each graph with torch's.

    Attributes:
        graphs: number of graphs compiled.
        compile_seconds: time that took.
    """

    def __init__(self, optimizer: Optimizer, config: RuntimeConfig, *, verify: bool) -> None:
        self._optimizer, self._config, self._verify = optimizer, config, verify
        self._family = FAMILIES[known_class(optimizer)]  # type: ignore[index]
        self._members = Members(optimizer, self._family)
        self._sessions: SessionFactory | None = None
        self._plans: dict[Any, _Plan] = {}
        self._last: dict[Rule, _Plan] = {}
        self.graphs, self.compile_seconds = 0, 0.0

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters that have a gradient.

        Raises:
            NeedsTorch: this update must be made by torch.
            MismatchError: the first update of a graph is not torch's; nothing has been changed.
        """
        groups = self._optimizer.param_groups
        self._check_settings(groups)
        decay = any(group["weight_decay"] != 0 for group in groups)
        rules = [self._family.rule(group, decay) for group in groups]
        try:
            members, gradients = self._members.find(rules)
            if members:
                self._update(groups, rules, members, gradients)
        except BaseException:
            self._members.forget()
            raise

    def _check_settings(self, groups: Sequence[Group]) -> None:
        if getattr(self._optimizer, "grad_scale", None) is not None:
            raise NeedsTorch("a GradScaler has given it the scale of its gradients")
        for group in groups:
            for flag in ("capturable", "differentiable"):
                if group.get(flag):
                    raise NeedsTorch(f"{flag}=True")
            tensors = {key: v for key, v in group.items() if key != "params" and isinstance(v, Tensor)}
            for key, value in tensors.items():
                if value.requires_grad:
                    raise NeedsTorch(f"{key} is a tensor that requires a gradient")
                if value.dtype != torch.float64 and any(p.dtype == torch.float64 for p in group["params"]):
                    raise NeedsTorch(f"{key} is a tensor of {value.dtype}, in which torch computes with it for float64")

    def _update(
        self, groups: Sequence[Group], rules: Sequence[Rule], members: Sequence[Member], gradients: Sequence[Tensor]
    ) -> None:
        classes: dict[_Class, int] = {}
        keys = self._classes_of(members)
        numbers = [classes.setdefault(key, len(classes)) for key in keys]
        limits = [self._family.limit(groups[key.group]) for key in classes]
        clip = not all(map(math.isinf, limits))
        # empty parameters count their updates, but have nothing to be updated
        filled = [k for k, m in enumerate(members) if m.param.numel()]
        by_rule: dict[Rule, list[int]] = {}
        for k in filled:
            by_rule.setdefault(rules[members[k].group], []).append(k)
        if clip and len(by_rule) > 1:
            raise NeedsTorch("its groups differ in what they compute, and are clipped by the norm of all gradients")
        products = {key: self._product(key, groups[key.group], members[keys.index(key)]) for key in classes}
        plans = []
        for rule, chosen in by_rule.items():
            own: dict[int, int] = {}
            local = [own.setdefault(numbers[k], len(own)) for k in chosen]
            plan = self._plan(rule, [members[k] for k in chosen], local, clip)
            for key, number in classes.items():
                if number in own:
                    count = key.counters[0] + 1 if key.counters else 1.0
                    plan.update.set_coefficients(
                        own[number],
                        self._family.all_numbers(rule, groups[key.group], count, products[key], key.first),
                    )
            plans.append((plan, [gradients[k] for k in chosen], [limits[n] for n in own] if clip else None))
        check = self._verify and not all(plan.checked for plan, *_ in plans)
        first = FirstUpdate(self._optimizer, members) if check else None
        if first is not None:
            timeline.spoil()
        for member in members:
            self._members.enter(member)
        recording = timeline.present
        if recording is None:
            for plan, given, most in plans:
                plan.update.run(given, limits=most)
        else:
            for plan, given, most in plans:
                began = time.perf_counter()
                plan.update.run(given, limits=most)
                recording.add("onnxruntime", "update", began)
        if self._family.counters:
            torch._foreach_add_([m.counters[0] for m in members], 1.0)
        if len(self._family.counters) > 1:
            for member, key in zip(members, keys, strict=True):
                member.counters[1].fill_(products[key])
        # ONNX Runtime writes behind autograd's back, which must know of it to refuse what it has kept for a backward
        torch.autograd.graph.increment_version([m.param for m in members])
        if first is not None:
            first.compare()
        for plan, *_ in plans:
            plan.checked = True

    def _classes_of(self, members: Sequence[Member]) -> list[_Class]:
        counters = [c for m in members for c in m.counters]
        if len({(c.dtype, c.device) for c in counters}) == 1 and all(c.dim() == 0 for c in counters):
            values = torch.stack(counters).tolist()
        else:
            values = [float(c) for c in counters]
        n = len(self._family.counters)
        return [
            # only momentum without a counter begins in another way
            _Class(m.group, m.param.dtype, tuple(values[k * n : k * n + n]), not n and m.fresh is not None)
            for k, m in enumerate(members)
        ]

    def _product(self, key: _Class, group: Group, member: Member) -> float:
        """The second counter after this update, rounded as torch keeps it."""
        if len(key.counters) < 2:
            return 1.0
        return float(member.counters[1] * self._family.factor(group, key.counters[0] + 1))

    def _sessions_on(self, device: torch.device) -> SessionFactory:
        if self._sessions is None or self._sessions.device != device:
            self._sessions = SessionFactory(self._config, device)
        return self._sessions

    def _plan(self, rule: Rule, members: list[Member], numbers: list[int], clip: bool) -> _Plan:
        """The update graph of ``members`` whose classes have these numbers."""
        if len({m.param.device for m in members}) > 1:
            raise NeedsTorch("its parameters are on several devices")
        last = self._last.get(rule)
        if last is not None and last.clip == clip and last.numbers == numbers and last.is_for(members):
            return last
        key = (rule, clip, tuple((id(m.param), n, *m.form) for m, n in zip(members, numbers, strict=True)))
        plan = self._plans.get(key)
        if plan is None:
            if self.graphs == _MOST_GRAPHS:
                raise NeedsTorch(
                    f"it has had {_MOST_GRAPHS} graphs, one for each set of parameters with a gradient or with other "
                    "numbers of updates behind them, and would need another one"
                )
            started = time.perf_counter()
            params, states = [m.param for m in members], [m.states for m in members]
            try:
                update = Update(rule, params, states, numbers, self._sessions_on(params[0].device), clip=clip)
            except ValueError as error:
                raise NeedsTorch(str(error)) from error
            plan = self._plans[key] = _Plan(update, members, numbers, clip)
            self.graphs += 1
            self.compile_seconds += time.perf_counter() - started
        elif any(a is not b for a, b in zip(plan.members, members, strict=True)):
            try:
                plan.update.use([m.states for m in members])
            except ValueError as error:
                raise NeedsTorch(str(error)) from error
            plan.members = members
        self._last[rule] = plan
        return plan
