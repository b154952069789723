"""An update graph bound to the memory of parameters and states."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from lightning_ort.runtime.session import OrtSession, RuntimeConfig
from lightning_ort.updates.graph import Slot, UpdateGraph
from lightning_ort.updates.inplace import may_overwrite
from lightning_ort.updates.pieces import Part, pieces_of
from lightning_ort.updates.rule import Rule

__all__ = ["Update"]

_THREADED = 1 << 20
"""Elements from which a second thread pays; below, waking it takes longer than the passes."""


class Update:
    """Applies ``rule`` to ``params`` in place, all in one run of ONNX Runtime.

    Args:
        rule: what is computed.
        params: dense tensors of float32 or float64, without common elements.
        states: per parameter the tensors that the rule names, of its shape, contiguous.
        groups: per parameter the number of its group; a group has one element type and one set of coefficients.
        config: how sessions are made; the optimization level is not taken from it.
        clip: clip by the norm of all gradients.
        guard: change nothing if a gradient is not finite.

    Raises:
        ValueError: parameters share memory, or a type is not one of the two.

    Attributes:
        coefficients: per group a tensor of the rule's numbers, to be filled (:meth:`set_coefficients`) before
            :meth:`run`.
        model: the ONNX graph that is executed.
    """

    def __init__(
        self,
        rule: Rule,
        params: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        groups: Sequence[int],
        config: RuntimeConfig,
        *,
        clip: bool = False,
        guard: bool = False,
    ) -> None:
        self._params, self._states, self._device = list(params), list(states), params[0].device
        _check(self._params)
        dtypes = {g: p.dtype for g, p in zip(groups, params, strict=True)}
        ordered = [dtypes.get(g, torch.float32) for g in range(max(groups) + 1)]
        pieces = pieces_of([p.numel() for p in params], groups, elementwise=rule.elementwise)
        graph = UpdateGraph(rule, pieces, ordered, clip=clip, guard=guard)
        self.model: ir.Model = graph.model
        self.coefficients = [torch.zeros(len(rule.coefficients), dtype=dtype, device=self._device) for dtype in ordered]
        # written through numpy, which is quicker for so few numbers
        self._rows = [c.numpy() if self._device.type == "cpu" else None for c in self.coefficients]
        self._scale = torch.ones((), dtype=graph.wide, device=self._device)
        self._limits = torch.full((len(ordered),), torch.inf, dtype=graph.wide, device=self._device)
        self._finite = torch.ones((), dtype=torch.bool, device=self._device) if guard else None
        self._graph_inputs, self._graph_outputs = graph.inputs, graph.outputs
        sources = dict(zip(graph.inputs, graph.model.graph.inputs, strict=True))
        self._in_place = [
            slot in sources and may_overwrite(value, sources[slot])
            for slot, value in zip(graph.outputs, graph.model.graph.outputs, strict=True)
        ]
        size = sum(p.numel() for p in params)
        self._session = OrtSession(
            ir.to_proto(graph.model).SerializeToString(),
            _as_written(config),
            self._device,
            double=torch.float64 in ordered,
            small=size < _THREADED,
        )
        self._gradient_parts = [(k, s.where) for k, s in enumerate(self._graph_inputs) if s.what == "grad"]
        self._addresses: list[int] = []
        self._places: list[int] = []
        self._last_scale, self._last_limits = 1.0, [math.inf] * len(ordered)
        self._bind()

    def _bind(self) -> None:
        """Views of all memory that stays where it is from run to run."""
        self._addresses, self._places = [p.data_ptr() for p in self._params], []
        # a parameter that does not lie in memory as its shape says is read from a copy and written back
        flat = [_flat(p) if p.is_contiguous() else None for p in self._params]
        fixed: dict[str | int, list[Tensor | None]] = {"param": flat}
        for k in range(len(self._states[0])):
            fixed[k] = [_flat(states[k]) for states in self._states]

        def view(slot: Slot) -> Tensor | None:
            if isinstance(slot.where, Part):
                if slot.what == "grad":
                    return None
                whole = fixed[slot.what][slot.where.param]
                return None if whole is None else whole[slot.where.start : slot.where.stop]
            if isinstance(slot.where, tuple):
                group, index = slot.where
                return self.coefficients[group][index]
            if isinstance(slot.where, int):
                return self._limits[slot.where]
            return self._finite if slot.what == "finite" else self._scale

        self._reads = [view(slot) for slot in self._graph_inputs]
        self._scattered = [k for k, r in enumerate(self._reads) if r is None and self._graph_inputs[k].what == "param"]
        self._writes: list[Tensor] = []
        self._copies: list[tuple[Slot, Tensor]] = []
        for slot, in_place in zip(self._graph_outputs, self._in_place, strict=True):
            target = view(slot)
            if slot.what != "finite" and (target is None or not in_place):
                assert isinstance(slot.where, Part)
                buffer = torch.empty(len(slot.where), dtype=self._params[slot.where.param].dtype, device=self._device)
                self._copies.append((slot, buffer))
                target = buffer
            assert target is not None
            self._writes.append(target)

    @torch.no_grad()
    def run(self, gradients: Sequence[Tensor], *, scale: float = 1.0, limits: Sequence[float] | None = None) -> bool:
        """Update everything by ``gradients``, one per parameter, shaped like it.

        Args:
            gradients: of the loss, possibly a multiple of it.
            scale: what to multiply them with.
            limits: per group the largest norm of all scaled gradients (for ``clip``).

        Returns:
            Whether all gradients were finite; only ``guard`` looks, without it the answer is ``True``.
        """
        if [p.data_ptr() for p in self._params] != self._addresses:
            self._bind()
        if scale != self._last_scale:
            self._scale.fill_(scale)
            self._last_scale = scale
        if limits is not None and list(limits) != self._last_limits:
            self._limits.copy_(torch.tensor(limits, dtype=torch.float64))
            self._last_limits = list(limits)
        # gradients come out of a pool, most of the time at the same places
        places = [g.data_ptr() if g.is_contiguous() else 0 for g in gradients]
        if places == self._places and not self._scattered and 0 not in places:
            self._session.run_again()
        else:
            self._places = []
            self._run_elsewhere(gradients)
            self._places = places
        finite = self._finite is None or bool(self._finite)
        if self._copies and finite:
            self._copy_back()
        return finite

    def _run_elsewhere(self, gradients: Sequence[Tensor]) -> None:
        reads: list[Any] = list(self._reads)
        flat = [g.reshape(-1) for g in gradients]
        for k, part in self._gradient_parts:
            assert isinstance(part, Part)
            whole = flat[part.param]
            reads[k] = whole if len(part) == whole.numel() else whole[part.start : part.stop]
        for k in self._scattered:
            part = self._graph_inputs[k].where
            assert isinstance(part, Part)
            reads[k] = self._params[part.param].reshape(-1)[part.start : part.stop]
        self._session.run(reads, self._writes)

    def set_coefficients(self, group: int, numbers: Sequence[float]) -> None:
        """The rule's numbers for a group, rounded to its element type."""
        row = self._rows[group]
        if row is None:
            self.coefficients[group].copy_(torch.tensor(numbers, dtype=torch.float64))
        else:
            row[:] = numbers

    def _copy_back(self) -> None:
        rows: dict[int, Tensor] = {}
        for slot, buffer in self._copies:
            assert isinstance(slot.where, Part)
            number, start, stop = slot.where.param, slot.where.start, slot.where.stop
            if slot.what != "param":
                _flat(self._states[number][int(slot.what)])[start:stop].copy_(buffer)
            elif self._params[number].is_contiguous():
                _flat(self._params[number])[start:stop].copy_(buffer)
            else:
                rows.setdefault(number, self._params[number].reshape(-1).clone())[start:stop] = buffer
        for number, values in rows.items():
            self._params[number].copy_(values.view(self._params[number].shape))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


def _check(params: Sequence[Tensor]) -> None:
    wrong = {str(p.dtype) for p in params if p.dtype not in (torch.float32, torch.float64)}
    if wrong:
        raise ValueError(
            f"parameters of {', '.join(sorted(wrong))} cannot be updated in ONNX Runtime; expected float32 or float64."
        )
    spans = sorted((p.data_ptr(), p.data_ptr() + p.numel() * p.element_size()) for p in params if p.numel())
    if any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
        raise ValueError(
            "two parameters share memory without being the same parameter, so each would be updated twice. Make them "
            "one nn.Parameter, or give each its own tensor."
        )


def _as_written(config: RuntimeConfig) -> RuntimeConfig:
    """``config`` without graph optimization, on which the order of reads and writes relies."""
    import onnxruntime

    level = {"graph_optimization_level": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL}
    options = config.session_options
    if isinstance(options, onnxruntime.SessionOptions):
        options = {"intra_op_num_threads": options.intra_op_num_threads}
    return RuntimeConfig(config.providers, config.provider_options, {**(options or {}), **level})
