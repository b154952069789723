"""Updates of named parameters: which go together, with which coefficients, and who computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from lightning_ort.optim.rules import FusedAdam
from lightning_ort.optim.settings import OptimizerSettings
from lightning_ort.optim.update import Update
from lightning_ort.optim.update.graph import UpdateGraph, pieces_of
from lightning_ort.runtime.factory import SessionFactory

__all__ = ["Updater"]

_MOST_PLANS = 16
"""sets of parameters whose updates are kept: where parts of a model take turns, the sets come again"""


class Updater:
    """Updates parameters in place, by ONNX Runtime or, where that is allowed and faster, by torch's fused kernel.

    Args:
        settings: name of each parameter to its settings; of one kind, and for Adam of one ``decay``.
        params: name to tensor, float32 or float64, in the order of ``settings``.
        sessions: makes them on the device of the parameters, and says who may compute what (``placement``).
        guard: change nothing where a gradient is not finite.
        moments: name to the tensors of the rule by name, shaped like the parameter; zeros by default.

    Raises:
        ValueError: the settings differ in kind or in ``decay``, or two tensors share memory.

    Attributes:
        rule: what an update computes.
        moments: per parameter its states, by the names of the rule.
        counts: per parameter how many updates it has had; parameters of one group share theirs (see
            :meth:`forget_plan`).
    """

    def __init__(
        self,
        settings: Mapping[str, OptimizerSettings],
        params: Mapping[str, Tensor],
        sessions: SessionFactory,
        *,
        guard: bool = False,
        moments: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        self._settings, self._params, self._sessions = dict(settings), dict(params), sessions
        each = list(self._settings.values())
        for attribute in ("kind", "decay", "momentum", "nesterov"):
            found = {getattr(s, attribute) for s in each}
            if len(found) > 1:
                raise ValueError(
                    f"The parameters have different settings {attribute!r} ({', '.join(map(repr, sorted(found)))}); "
                    "expected one for all."
                )
        self.guard = guard
        self.clip = any(s.clip_grad_norm is not None for s in each)
        general = each[0] if each else OptimizerSettings()
        self.rule = general.rule_for(decays=any(s.weight_decay for s in each))
        self.moments: dict[str, dict[str, Tensor]] = {
            name: {
                s: torch.zeros(p.shape, dtype=p.dtype, device=p.device) if moments is None else moments[name][s]
                for s in self.rule.states
            }
            for name, p in self._params.items()
        }
        self.counts = dict.fromkeys(self._params, 0)
        self._empty = {name for name, p in self._params.items() if not p.numel()}
        self._plans: dict[Any, Update | FusedAdam] = {}  # the one that was used last comes last
        self._update: Update | FusedAdam | None = None
        self._updated: list[str] = []
        self._leaders: list[str] = []

    def forget_plan(self) -> None:
        """Call when :attr:`counts` have been changed."""
        self._update = None

    def groups_of(self, names: Iterable[str]) -> list[int]:
        """Return the number of each parameter's group: parameters with equal settings, type and count."""
        numbers: dict[Any, int] = {}
        keys = [(self._settings[n], self._params[n].dtype, self.counts[n]) for n in names]
        return [numbers.setdefault(key, len(numbers)) for key in keys]

    def step(self, gradients: Mapping[str, Tensor], lr: float, *, scale: float = 1.0) -> bool:
        """Update the parameters that have a gradient.

        Args:
            gradients: name to gradient, shaped like the parameter; may be overwritten.
            lr: learning rate.
            scale: what the gradients are multiplied with.

        Returns:
            Whether it was made: with ``guard``, gradients that are not finite change nothing.
        """
        # those without elements count their updates, but have nothing to be updated
        filled = {n: g for n, g in gradients.items() if n not in self._empty} if self._empty else gradients
        finite = self._apply(filled, lr, scale) if filled else True
        if finite:
            for name in gradients:
                self.counts[name] += 1
        return finite

    def _apply(self, gradients: Mapping[str, Tensor], lr: float, scale: float) -> bool:
        if self._update is None or self._updated != list(gradients):
            self._plan(list(gradients))
        assert self._update is not None
        for group, name in enumerate(self._leaders):
            self._update.set_coefficients(group, self._numbers(name, lr, self.counts[name] + 1))
        return self._update.run(list(gradients.values()), scale=scale, limits=self._limits())

    def bound_to(self, gradients: Mapping[str, Tensor]) -> Callable[[float, int], None]:
        """Return a function of learning rate and number of the update, sooner than :meth:`step`.

        It updates by what ``gradients`` hold when it is called; these and the parameters must stay where they are, no
        parameter may require a gradient, and all must be of one group but for their types. It leaves gradients as they
        are, and :attr:`counts` too.
        """
        names = list(gradients)
        groups = self.groups_of(names)
        # of its own, bound to these gradients; the fused kernel would leave clipped ones behind
        self._take(self._made(names, groups, fused=False if self.clip or self.guard else None), names, groups)
        settings, values = self._settings[names[0]], list(gradients.values())
        if isinstance(self._update, FusedAdam):
            fused, fused_numbers = self._update.bound_to(values), settings.fused_numbers
            return lambda lr, count: fused(fused_numbers(lr, count))
        update, limits, groups_of_numbers = self._update, self._limits(), range(len(self._leaders))
        assert update is not None
        has_run = False

        def apply(lr: float, count: int) -> None:
            nonlocal has_run
            numbers = settings.numbers(lr, count, self.rule)
            for group in groups_of_numbers:
                update.set_coefficients(group, numbers)
            if has_run:
                update.run_again()
            else:
                update.run(values, limits=limits)
                has_run = True

        return apply

    def graph(self) -> ir.Model:
        """Return the ONNX graph of an update of all parameters, whoever computes it."""
        if isinstance(self._update, Update) and self._updated == list(self._params):
            return self._update.model
        groups = self.groups_of(self._params)
        sizes = [p.numel() for p in self._params.values()]
        dtypes = {g: p.dtype for g, p in zip(groups, self._params.values(), strict=True)}
        pieces = pieces_of(sizes, groups, elementwise=self.rule.elementwise)
        ordered = [dtypes[g] for g in range(len(dtypes))]
        return UpdateGraph(self.rule, pieces, ordered, clip=self.clip, guard=self.guard).model

    def _plan(self, names: Sequence[str]) -> None:
        """Go on with the update of ``names``, which is made where none is kept."""
        groups = self.groups_of(names)
        key = tuple(names), tuple(groups)
        update = self._plans.pop(key, None) or self._made(names, groups, fused=None)
        self._plans[key] = update
        if len(self._plans) > _MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        self._take(update, names, groups)

    def _take(self, update: Update | FusedAdam, names: Sequence[str], groups: Sequence[int]) -> None:
        self._update, self._updated = update, list(names)
        self._leaders = [names[groups.index(g)] for g in range(max(groups) + 1)]

    def _made(self, names: Sequence[str], groups: Sequence[int], *, fused: bool | None) -> Update | FusedAdam:
        params = [self._params[n] for n in names]
        states = [list(self.moments[n].values()) for n in names]
        if fused is None:
            fused = FusedAdam.can_do(self.rule, params, self._sessions.placement)
        make: Callable[..., Update | FusedAdam] = FusedAdam if fused else self._graph_update
        return make(params, states, groups, clip=self.clip, guard=self.guard)

    def _graph_update(self, params: Any, states: Any, groups: Any, **flags: bool) -> Update:
        return Update(self.rule, params, states, groups, self._sessions, **flags)

    def _limits(self) -> list[float] | None:
        limits = [self._settings[n].clip_grad_norm for n in self._leaders]
        return [float("inf") if limit is None else limit for limit in limits] if self.clip else None

    def _numbers(self, name: str, lr: float, count: int) -> tuple[float, ...]:
        settings = self._settings[name]
        return (
            settings.fused_numbers(lr, count)
            if isinstance(self._update, FusedAdam)
            else settings.numbers(lr, count, self.rule)
        )
