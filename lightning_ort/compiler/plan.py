"""A functional ATen graph placed: runs of operators for ONNX Runtime, and single ones that stay in torch."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from time import perf_counter
from typing import Any, TypeVar

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.allocation import allocator
from lightning_ort.compiler.dynamo_words import source_line
from lightning_ort.compiler.functional_graph import TRACED_KEYS, Untraceable
from lightning_ort.compiler.lowering import LOWERINGS, GraphBuilder, NotLowered
from lightning_ort.compiler.lowering.builder import dtype_of, no_form
from lightning_ort.compiler.passes import has_doubles, has_extreme_factor, optimize, save_memory
from lightning_ort.compiler.placement import (
    SMALL,
    Placement,
    Segment,
    better_in_torch,
    is_foreign,
    is_of_nothing,
    operations,
)
from lightning_ort.compiler.symbolic_shapes import Sizes, UnknownSize, is_number
from lightning_ort.report import timeline
from lightning_ort.runtime.factory import SessionFactory
from lightning_ort.runtime.providers.cpu import chosen_by_bits
from lightning_ort.runtime.session import OrtSession
from lightning_ort.runtime.tensors import is_supported
from lightning_ort.validation import first_line

__all__ = ["Fallback", "Plan", "build_plan"]

_From = TypeVar("_From")
_To = TypeVar("_To")

Slot = int
Slots = dict[fx.Node, Slot]
Step = Callable[[list[Any]], None]
"""Computes one segment on the values in all slots."""


@dataclasses.dataclass(frozen=True)
class Fallback:
    """One operator that is executed by torch."""

    operator: str
    reason: str
    source: str
    """the user's line, as far as it is known"""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Executable form of a functional graph.

    Attributes:
        sessions: of its segments.
        fallbacks: what runs in torch because it has to, and why.
        preferred: operators that run in torch by choice, one entry per call.
        on_cpu: types of the ONNX operators that the CPU executes in a plan for a GPU, one entry per node.
    """

    sessions: list[OrtSession]
    fallbacks: list[Fallback]
    preferred: list[str]
    on_cpu: list[str]
    _steps: list[Step]
    _numbers: list[Callable[[Sequence[Any]], tuple[Any, ...]]]
    _n_inner: int
    _last_reads: list[list[Slot]]
    _in_torch: list[bool]

    @property
    def segments(self) -> tuple[int, int]:
        """How many ONNX Runtime executes, and how many torch."""
        return self._in_torch.count(False), self._in_torch.count(True)

    def run(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        """Compute ``outputs``, tensors like the results, from ``inputs``."""
        values = [*inputs, *[evaluate(inputs)[0] for evaluate in self._numbers], *outputs]
        steps = self._steps if timeline.present is None else self._timed(timeline.present)
        if len(steps) == 1:
            steps[0](values)
            return
        values += [None] * self._n_inner
        for step, done in zip(steps, self._last_reads, strict=True):
            step(values)
            for slot in done:
                values[slot] = None

    def _timed(self, recording: timeline.Recording) -> list[Step]:
        def timed(step: Step, where: timeline.Where) -> Step:
            def run(values: list[Any]) -> None:
                began = perf_counter()
                step(values)
                recording.add(where, "piece", began)

            return run

        places = zip(self._steps, self._in_torch, strict=True)
        return [timed(step, "torch" if in_torch else "onnxruntime") for step, in_torch in places]


def build_plan(
    module: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node], sessions: SessionFactory
) -> Plan:
    """Cut a graph into segments and compile them.

    Args:
        module: the ATen graph; calls that ONNX cannot express, or that this ONNX Runtime lacks, are found on the way.
        inputs: its placeholders, in the order in which :meth:`Plan.run` takes their values.
        outputs: nodes whose values :meth:`Plan.run` writes, without repetition.
        sessions: makes them, for the device that computes; tensors live there or on the CPU.

    Raises:
        Untraceable: neither ONNX Runtime nor torch can compute a node.
    """
    return _Planner(module, inputs, outputs, sessions).plan()


class _Planner:
    """Places a graph. Plans refer to none: the graph with its fake tensors is as large as a small network's weights."""

    def __init__(
        self, module: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node], sessions: SessionFactory
    ) -> None:
        self._module, self._inputs, self._outputs = module, list(inputs), list(outputs)
        self._factory = sessions
        self._sizes = Sizes(self._inputs)
        self._numbers: list[Callable[[Sequence[Any]], tuple[Any, ...]]] = []
        self._sessions: list[OrtSession] = []
        self._on_cpu: list[str] = []
        self._preferred = better_in_torch(module.graph, sessions)
        # all at once: for each that is found later, the whole graph is lowered again
        calls = [n for n in module.graph.nodes if n not in self._preferred and _can_leave(n)]
        self._reasons = {n: no_form(n) for n in calls if n.target not in LOWERINGS and not is_number(n)}

    def plan(self) -> Plan:
        """Cut into segments and compile them, moving what turns out not to work in ONNX Runtime to torch."""
        while True:
            segments = Placement(self._module.graph, self._outputs, self._reasons.keys() | self._preferred).segments()
            try:
                steps, n_inner, last_reads = self._compile(segments)
                break
            except _Rejected as rejected:
                self._take_out(rejected)
        return Plan(
            self._sessions,
            [Fallback(str(n.target), reason, source_line(n)) for n, reason in self._reasons.items()],
            [str(n.target) for n in self._preferred if not is_of_nothing(n)],
            self._on_cpu,
            steps,
            self._numbers,
            n_inner,
            last_reads,
            [segment.in_torch or not segment.outputs for segment in segments],
        )

    def _take_out(self, rejected: _Rejected) -> None:
        """Have nodes computed elsewhere; each rejection takes more out of ONNX Runtime, or ends the compilation.

        Raises:
            Untraceable: torch cannot compute one of them by itself either.
        """
        for node, reason in rejected.reasons.items():
            if is_number(node) and node.op == "call_function":
                self._compute_ahead(node, reason)
                return  # the graph has changed: of the others, some may be gone
        for node, reason in rejected.reasons.items():
            if not _can_leave(node) or node in self._reasons or node in self._preferred:
                raise Untraceable(reason) from rejected
            self._reasons[node] = reason

    def _compute_ahead(self, number: fx.Node, reason: str) -> None:
        """Make ``number`` a further input, computed before each run from the sizes of the others."""
        try:
            evaluator = self._sizes.evaluator([number.meta["val"]])
        except UnknownSize:
            raise Untraceable(reason) from None
        graph = self._module.graph
        with graph.inserting_before(next(iter(graph.nodes))):
            ahead = graph.placeholder(f"{number.name}_ahead")
        ahead.meta["val"] = number.meta["val"]
        number.replace_all_uses_with(ahead)
        graph.eliminate_dead_code()
        self._inputs.append(ahead)
        self._numbers.append(evaluator)

    def _compile(self, segments: list[Segment]) -> tuple[list[Step], int, list[list[Slot]]]:
        """One step per segment, how many values pass between them, and which are done with after each."""
        inputs, self._sessions, self._on_cpu = len(self._inputs), [], []
        # a result that is an input as it stands is copied: it is read from one slot and written to another
        writes: dict[fx.Node, Slot] = {n: inputs + i for i, n in enumerate(self._outputs)}
        for segment in segments:
            for node in segment.outputs:
                writes.setdefault(node, inputs + len(writes))
        reads = writes | {n: i for i, n in enumerate(self._inputs)}
        # one without results is an assertion about what torch computed
        in_torch = [segment.in_torch or not segment.outputs for segment in segments]
        # before any session is made, which would be in vain
        lowered = _each(self._lower, [s for s, is_torchs in zip(segments, in_torch, strict=True) if not is_torchs])
        sessions = iter(_each(self._session, lowered))
        steps = [
            self._torch_step(segment, reads, writes) if is_torchs else self._ort_step(*next(sessions), reads, writes)
            for segment, is_torchs in zip(segments, in_torch, strict=True)
        ]
        return steps, len(writes) - len(self._outputs), self._find_last_reads(segments, reads)

    def _find_last_reads(self, segments: list[Segment], reads: Slots) -> list[list[Slot]]:
        """Per segment the inner slots that no later one reads."""
        kept = len(self._inputs) + len(self._outputs)
        last = {reads[n]: k for k, segment in enumerate(segments) for n in segment.inputs if reads[n] >= kept}
        return [[slot for slot, at in last.items() if at == k] for k in range(len(segments))]

    def _torch_step(self, segment: Segment, slots: Slots, written: Slots) -> Step:
        graph = fx.Graph()
        copies = {n: graph.placeholder(n.name) for n in segment.inputs}
        for node in segment.nodes:
            copies[node] = graph.node_copy(node, lambda n: copies[n] if n in copies else _attribute(graph, n, copies))
            if node.target in _VIEWS:  # what torch would have copied before, to be able to view it, is not copied here
                copies[node].target = torch.ops.aten.reshape.default
        graph.output([copies[n] for n in segment.outputs])
        compute = fx.GraphModule(self._module, graph).forward
        reads, writes = [slots[n] for n in segment.inputs], [written[n] for n in segment.outputs]
        # torch's own kernels may call what autocast casts; others are written for it, and may give other types then
        own = not any(map(is_foreign, segment.nodes))
        types = [] if own else [n.meta["val"].dtype for n in segment.outputs]

        def step(values: list[Any]) -> None:
            with torch._C._ExcludeDispatchKeyGuard(TRACED_KEYS) if own else contextlib.nullcontext(), torch.no_grad():
                results = compute(*[values[i] for i in reads])
            if not own:
                results = [result.to(dtype) for result, dtype in zip(results, types, strict=True)]
            for i, result in zip(writes, results, strict=True):
                if values[i] is None:
                    values[i] = result
                else:  # an output of the plan, allocated ahead
                    values[i].copy_(result)

        return step

    def _ort_step(
        self, segment: Segment, session: OrtSession, inputs: Sequence[fx.Node], slots: Slots, written: Slots
    ) -> Step:
        reads, writes = [slots[n] for n in inputs], [written[n] for n in segment.outputs]
        numbers = {slots[n]: dtype_of(n) for n in inputs if is_number(n)}
        ahead = set(self._outputs)
        inner = [n for n in segment.outputs if n not in ahead]
        if not inner and not numbers:
            pick_reads, pick_writes = _picker(reads), _picker(writes)
            return lambda values: session.run(pick_reads(values), pick_writes(values))
        allocate, inner_slots = allocator(inner, self._sizes, self._factory.device), [written[n] for n in inner]
        n_inputs = len(self._inputs)

        def step(values: list[Any]) -> None:
            if inner_slots:
                for i, tensor in zip(inner_slots, allocate(values[:n_inputs]), strict=True):
                    values[i] = tensor
            feeds = [values[i] for i in reads]
            if numbers:
                for k, i in enumerate(reads):
                    if i in numbers:
                        data = [values[i]] if numbers[i] == torch.int64 else values[i]
                        feeds[k] = torch.tensor(data, dtype=numbers[i])
            session.run(feeds, [values[i] for i in writes])

        return step

    def _lower(self, segment: Segment) -> tuple[Segment, GraphBuilder, list[fx.Node]]:
        """``segment`` in ONNX, and what it reads."""
        builder = GraphBuilder(
            one_thread=self._factory.in_one_thread(small=operations(segment.nodes) < SMALL),
            by_bits=chosen_by_bits() if self._factory.only_cpu else (),
        )
        used = set(itertools.chain.from_iterable(n.all_input_nodes for n in segment.nodes)) | set(segment.outputs)
        inputs = [n for n in segment.inputs if n in used]
        for node in segment.nodes:
            foreign = _foreign_dtypes([node, *node.all_input_nodes])
            if foreign:
                raise _Rejected({_owner(node): f"{foreign} tensors cannot be passed to ONNX Runtime"})
        for node in inputs:
            builder.add_input(node)
        for node in self._module.graph.nodes:
            if node.op == "get_attr" and node in used:
                value = attrgetter(str(node.target))(self._module)
                if isinstance(value, torch.Tensor):  # and no branch of torch.cond, which has no lowering
                    builder.add_initializer(node, value)
        for node in segment.nodes:
            try:
                builder.lower(node)
            except NotLowered as reason:
                raise _Rejected({_owner(node): str(reason)}) from None
        return segment, builder, inputs

    def _session(
        self, lowered: tuple[Segment, GraphBuilder, list[fx.Node]]
    ) -> tuple[Segment, OrtSession, list[fx.Node]]:
        segment, builder, inputs = lowered
        by_name = {n.name: n for n in segment.nodes}
        model = optimize(builder.model(segment.outputs))
        repeats = save_memory(model)
        live = {v.name for v in model.graph.inputs}
        inputs = [n for n in inputs if n.name in live]
        try:
            session = self._factory.session(
                ir.to_proto(model).SerializeToString(),
                double=has_doubles(model),
                small=operations(segment.nodes) < SMALL,
                repeats=repeats,
                extreme=has_extreme_factor(model),
                same_shapes=all(
                    isinstance(d, int) for n in [*inputs, *segment.outputs] for t in _tensors(n) for d in t.shape
                ),
                places={name: _place(by_name[name], accepted) for name, accepted in builder.accepted.items()},
            )
        except Exception as error:
            node = _blamed(str(error), by_name)
            if node is None:
                raise
            raise _Rejected({_owner(node): first_line(error)}) from error
        self._sessions.append(session)
        self._on_cpu += session.on_cpu or ()
        return segment, session, inputs


def _picker(slots: Sequence[Slot]) -> Callable[[list[Any]], Sequence[Any]]:
    if len(slots) < 2:
        return lambda values: [values[i] for i in slots]
    return operator.itemgetter(*slots)


_VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


class _Rejected(Exception):
    """ONNX Runtime cannot compute some nodes, for those reasons."""

    def __init__(self, reasons: dict[fx.Node, str]) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = reasons


def _each(make: Callable[[_From], _To], parts: Sequence[_From]) -> list[_To]:
    """What ``make`` gives for all ``parts``, or all that is rejected of them."""
    made: list[_To] = []
    reasons: dict[fx.Node, str] = {}
    cause = None
    for part in parts:
        try:
            made.append(make(part))
        except _Rejected as rejected:
            reasons |= rejected.reasons
            cause = cause or rejected
    if reasons:
        raise _Rejected(reasons) from cause
    return made


def _can_leave(node: fx.Node) -> bool:
    """Whether torch may compute a node by itself.

    Not ``as_strided``, which reads memory as eager laid it out: a segment's tensors lie otherwise.
    """
    return node.op == "call_function" and node.target is not torch.ops.aten.as_strided.default


def _owner(node: fx.Node) -> fx.Node:
    """The call that produces ``node``, when ``node`` only picks one of its results."""
    return node.args[0] if node.target is operator.getitem and isinstance(node.args[0], fx.Node) else node


def _attribute(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    assert node.op == "get_attr", node
    copies[node] = graph.get_attr(str(node.target))
    return copies[node]


def _place(node: fx.Node, accepted: str) -> str:
    """Operator and line of the user's, for errors about values."""
    line = source_line(node)
    if str(node.target).startswith("aten._assert"):
        return line or "this step"
    return f"{node.target}{accepted and f', which takes {accepted}'}{line and f' ({line})'}"


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    val = node.meta.get("val")
    return [v for v in (val if isinstance(val, (tuple, list)) else [val]) if isinstance(v, torch.Tensor)]


def _foreign_dtypes(nodes: Sequence[fx.Node]) -> str:
    """Element types among ``nodes`` that cannot be bound to a session."""
    return ", ".join(sorted({str(t.dtype) for n in nodes for t in _tensors(n) if not is_supported(t.dtype)}))


def _blamed(message: str, by_name: dict[str, fx.Node]) -> fx.Node | None:
    """The fx node that ONNX Runtime complains about: ONNX nodes are named after the fx node they come from."""
    for name in re.findall(r"([A-Za-z_]\w*)/\w+_\d+", message):
        if name in by_name:
            return by_name[name]
    return None
