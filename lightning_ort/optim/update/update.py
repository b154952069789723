"""An update graph bound to the memory of parameters and states."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from lightning_ort.optim.rules.rule import Rule
from lightning_ort.optim.update.graph import CHUNK_ON_GPU, Part, Slot, UpdateGraph, pieces_of
from lightning_ort.runtime.factory import SessionFactory

__all__ = ["Spans", "Update", "flat", "may_overwrite", "reads_last"]

_THREADED = 1 << 20
"""Elements from which a second thread pays; below, waking it takes longer than the passes."""


class Update:
    """Applies ``rule`` to ``params`` in place, all in one run of ONNX Runtime.

    Args:
        rule: what is computed.
        params: dense tensors of float32 or float64, without common elements.
        states: per parameter the tensors that the rule names, of its shape.
        groups: per parameter the number of its group; a group has one element type and one set of coefficients.
        sessions: makes the one session, on the device of the parameters; the optimization level is not taken from it.
        clip: clip by the norm of all gradients.
        guard: change nothing if a gradient is not finite.

    Raises:
        ValueError: parameters or states share memory, or a type is not one of the two.

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
        sessions: SessionFactory,
        *,
        clip: bool = False,
        guard: bool = False,
    ) -> None:
        self._params, self._states, self._device = list(params), list(states), params[0].device
        _check(self._params)
        dtypes = {g: p.dtype for g, p in zip(groups, params, strict=True)}
        ordered = [dtypes.get(g, torch.float32) for g in range(max(groups) + 1)]
        chunk = CHUNK_ON_GPU if self._device.type == "cuda" else None
        pieces = pieces_of([p.numel() for p in params], groups, elementwise=rule.elementwise, chunk=chunk)
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
        # the order of reads and writes relies on edges that graph optimization may take away
        self._session = sessions.as_written().session(
            ir.to_proto(graph.model).SerializeToString(),
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
        self._addresses, self._places = self._present_addresses(), []
        self._orders = [_memory_order(p) for p in self._params]
        # a tensor that does not lie in memory like its parameter is read from a copy and written back
        fixed: dict[str | int, list[Tensor | None]] = {
            what: [flat(self._tensor(what, k), order) for k, order in enumerate(self._orders)]
            for what in ("param", *range(len(self._states[0])))
        }
        self._written = Spans(view for views in fixed.values() for view in views if view is not None)
        if self._written.overlap:
            raise ValueError("two states, or a state and a parameter, share memory. Give each its own tensor.")

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
        self._scattered = [k for k, r in enumerate(self._reads) if r is None and self._graph_inputs[k].what != "grad"]
        self._writes: list[Tensor] = []
        self._copies: list[tuple[Slot, Tensor, Tensor | None]] = []
        for slot, in_place in zip(self._graph_outputs, self._in_place, strict=True):
            target = view(slot)
            if slot.what != "finite" and (target is None or not in_place):
                assert isinstance(slot.where, Part)
                buffer = torch.empty(len(slot.where), dtype=self._params[slot.where.param].dtype, device=self._device)
                self._copies.append((slot, buffer, target))
                target = buffer
            assert target is not None
            self._writes.append(target)

    def _tensor(self, what: str | int, number: int) -> Tensor:
        """Parameter ``number``, or its state ``what``."""
        return self._states[number][what] if isinstance(what, int) else self._params[number]

    def _ordered(self, tensor: Tensor, number: int) -> Tensor:
        """``tensor``, shaped like parameter ``number``, with its dimensions in the order of that one's memory."""
        order = self._orders[number]
        return tensor if order is None else tensor.permute(order)

    def _present_addresses(self) -> list[Any]:
        places: list[Any] = [(p.data_ptr(), p.stride()) for p in self._params]
        places += [t.data_ptr() for states in self._states for t in states]
        return places

    def use(self, states: Sequence[Sequence[Tensor]]) -> None:
        """Go on with other tensors as states, of the same shapes and types.

        Raises:
            ValueError: they share memory.
        """
        self._states = [list(tensors) for tensors in states]
        self._bind()

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
        if self._present_addresses() != self._addresses:
            self._bind()
        if scale != self._last_scale:
            self._scale.fill_(scale)
            self._last_scale = scale
        if limits is not None and list(limits) != self._last_limits:
            self._limits.copy_(torch.tensor(limits, dtype=torch.float64))
            self._last_limits = list(limits)
        # gradients come out of a pool, most of the time at the same places
        ordered = [self._ordered(g, k) for k, g in enumerate(gradients)]
        places = [g.data_ptr() if g.is_contiguous() else 0 for g in ordered]
        if places == self._places and not self._scattered and 0 not in places:
            self._session.run_again()
        else:
            self._places = []
            if self._run_elsewhere(ordered):
                self._places = places
        finite = self._finite is None or bool(self._finite)
        if self._copies and finite:
            self._copy_back()
        return finite

    def run_again(self) -> None:
        """Like the last :meth:`run`, with the same scale and limits, where nothing has moved and no ``guard`` looks.

        Only what the gradients hold and the coefficients may be other values.
        """
        assert self._finite is None
        self._session.run_again()
        if self._copies:
            with torch.no_grad():
                self._copy_back()

    def _run_elsewhere(self, gradients: Sequence[Tensor]) -> bool:
        """Run on ``gradients``, with dimensions as in memory; whether these themselves were bound, and not copies."""
        reads: list[Any] = list(self._reads)
        flattened = [g.reshape(-1) for g in gradients]
        # a gradient that is (part of) a weight or a state would be read after that has been written
        shared = [g.is_contiguous() and self._written.touch(g) for g in gradients]
        flattened = [g.clone() if copy else g for g, copy in zip(flattened, shared, strict=True)]
        for k, part in self._gradient_parts:
            assert isinstance(part, Part)
            whole = flattened[part.param]
            reads[k] = whole if len(part) == whole.numel() else whole[part.start : part.stop]
        for k in self._scattered:
            slot = self._graph_inputs[k]
            assert isinstance(slot.where, Part)
            number, start, stop = slot.where.param, slot.where.start, slot.where.stop
            reads[k] = self._ordered(self._tensor(slot.what, number), number).reshape(-1)[start:stop]
        self._session.run(reads, self._writes)
        return not any(shared)

    def set_coefficients(self, group: int, numbers: Sequence[float]) -> None:
        """The rule's numbers for a group, rounded to its element type."""
        row = self._rows[group]
        if row is None:
            self.coefficients[group].copy_(torch.tensor(numbers, dtype=torch.float64))
        else:
            row[:] = numbers

    def _copy_back(self) -> None:
        rows: dict[tuple[str | int, int], Tensor] = {}
        for slot, buffer, target in self._copies:
            assert isinstance(slot.where, Part)
            number, start, stop = slot.where.param, slot.where.start, slot.where.stop
            if target is None:
                row = rows.get((slot.what, number))
                if row is None:
                    row = torch.empty(self._params[number].numel(), dtype=buffer.dtype, device=self._device)
                    rows[slot.what, number] = row
                target = row[start:stop]
            target.copy_(buffer)
        for (what, number), row in rows.items():
            ordered = self._ordered(self._tensor(what, number), number)
            ordered.copy_(row.view(ordered.shape))


def _check(params: Sequence[Tensor]) -> None:
    wrong = {str(p.dtype) for p in params if p.dtype not in (torch.float32, torch.float64)}
    if wrong:
        raise ValueError(
            f"parameters of {', '.join(sorted(wrong))} cannot be updated in ONNX Runtime; expected float32 or float64."
        )
    if Spans(params).overlap:
        raise ValueError(
            "two parameters share memory without being the same parameter, so each would be updated twice. Make them "
            "one nn.Parameter, or give each its own tensor."
        )


def _memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The order of dimensions in which ``tensor`` is contiguous (channels last, transposed), if it is not so by itself.

    ``None`` where it is, and where no order makes it so.
    """
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(len(strides)), key=lambda d: -strides[d]))
    return order if tensor.permute(order).is_contiguous() else None


def flat(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor | None:
    """All elements in one dimension, as they lie in memory; ``None`` if that is not the order of dimensions given."""
    ordered = tensor.detach() if order is None else tensor.detach().permute(order)
    return ordered.view(-1) if ordered.is_contiguous() else None


class Spans:
    """The memory of some tensors.

    Args:
        tensors: contiguous, in whatever order of dimensions.

    Attributes:
        overlap: whether any two of them have memory in common.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors if t.numel())
        self._starts, self._ends = [a for a, _ in spans], [b for _, b in spans]
        self.overlap = any(end > start for end, start in zip(self._ends, self._starts[1:], strict=False))

    def touch(self, tensor: Tensor) -> bool:
        """Whether contiguous ``tensor`` has memory in common with any of them."""
        start = tensor.data_ptr()
        k = bisect.bisect_left(self._starts, start + tensor.numel() * tensor.element_size())
        return k > 0 and self._ends[k - 1] > start


# Each element of the result is computed from the elements at the same place, which have been read when it is written.
_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Where", "Sqrt", "Neg", "Max", "Min"}


def may_overwrite(result: ir.Value, source: ir.Value) -> bool:
    """Whether ``result`` may be written into the memory of the graph input ``source``.

    ONNX Runtime runs nodes in any order that their edges allow, and knows nothing of memory that an input shares
    with a result. So each node that reads ``source`` must come before the one that writes ``result`` in every such
    order: the writer depends on it. The writer itself may read ``source`` if it works element by element and the two
    have the same shape. The graph must be executed as it stands; an optimizer could take an edge away.
    """
    writer = result.producer()
    if writer is None or source.is_graph_output():
        return False
    reads = any(node is writer for node, _ in source.uses())
    if reads and (writer.op_type not in _ELEMENTWISE or not _same_shape(result, source)):
        return False
    return reads_last(writer, source)


def reads_last(node: ir.Node, source: ir.Value) -> bool:
    """Whether all other readers of the graph input ``source`` come before ``node`` in every order."""
    readers = {reader for reader, _ in source.uses()} - {node}
    return readers <= _ancestors(node)


def _same_shape(result: ir.Value, source: ir.Value) -> bool:
    shape = source.shape
    return shape is not None and shape.is_static() and result.shape == shape


def _ancestors(node: ir.Node) -> set[ir.Node]:
    found: set[ir.Node] = set()
    pending = [node]
    while pending:
        for value in pending.pop().inputs:
            producer = value.producer() if value is not None else None
            if producer is not None and producer not in found:
                found.add(producer)
                pending.append(producer)
    return found
