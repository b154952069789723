"""A functional ATen graph placed: runs of operators for ONNX Runtime, and single ones that stay in torch."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
import torch.utils._pytree as pytree
from torch import fx

from lightning_ort.compiler.draws import DRAWS
from lightning_ort.compiler.lowering import GraphBuilder, NotLowered
from lightning_ort.compiler.passes import optimize
from lightning_ort.compiler.sizes import Sizes
from lightning_ort.runtime.dtypes import is_supported
from lightning_ort.runtime.session import OrtSession, RuntimeConfig

__all__ = ["Fallback", "Plan", "is_number"]

Slot = int
Slots = dict[fx.Node, Slot]


@dataclasses.dataclass(frozen=True)
class Fallback:
    """One operator that is executed by torch."""

    operator: str
    reason: str
    source: str
    """the user's line, as far as it is known"""


def is_number(node: fx.Node) -> bool:
    """Whether ``node`` is a symbolic size or scalar, not a tensor."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


class _Segment:
    """A part of the graph that one engine executes, reading and writing numbered slots."""

    def __init__(self, nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> None:
        self.nodes, self.inputs, self.outputs = nodes, inputs, outputs


class Plan:
    """Executable form of a functional graph.

    Args:
        graph: the ATen graph; calls that ONNX cannot express, or that this ONNX Runtime lacks, are found on the way.
        inputs: its placeholders, in the order in which :meth:`run` takes their values.
        outputs: nodes whose values :meth:`run` writes, without repetition.
        config: how sessions are made.
        device: where all tensors live.

    Attributes:
        fallbacks: what runs in torch, and why.
        models: the ONNX models, one per ONNX Runtime segment.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        config: RuntimeConfig,
        device: torch.device,
    ) -> None:
        self._module, self._inputs, self._outputs = module, list(inputs), list(outputs)
        self._config, self._device = config, device
        self._sizes = Sizes(self._inputs)
        self._reasons: dict[fx.Node, str] = {}
        self.models: list[ir.Model] = []
        self._place()

    @property
    def fallbacks(self) -> list[Fallback]:
        return [
            Fallback(str(node.target), reason, source_line(node))
            for node, reason in self._reasons.items()
            if not (node.op == "call_function" and node.target is _getitem)
        ]

    # -- placement ------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Cut into segments and compile them, moving what turns out not to work in ONNX Runtime to torch."""
        while True:
            segments = self._segments()
            try:
                self._steps = self._compile(segments)
                return
            except _Rejected as rejected:
                self._reasons[rejected.node] = rejected.reason

    def _segments(self) -> list[_Segment]:
        stage: dict[fx.Node, int] = {}
        for node in self._module.graph.nodes:
            if node.op != "call_function" or is_number(node):
                continue
            if node.target is _getitem:
                stage[node] = stage[node.args[0]]
                continue
            in_torch = node in self._reasons
            level = int(in_torch)
            for source in _tensor_sources(node):
                if source in stage:
                    level = max(level, stage[source] + (stage[source] % 2 != int(in_torch)))
            stage[node] = level
        levels: dict[int, list[fx.Node]] = {}
        for node, level in stage.items():
            levels.setdefault(level, []).append(node)
        segments = [self._segment(levels[level], stage, level) for level in sorted(levels)]
        passed_on = {n for n in self._outputs if n not in stage}
        if passed_on and segments:
            # numbers and untouched inputs that are results are computed by the last segment
            last = max((s for s in segments if not self._is_torch(s)), key=segments.index, default=None)
            if last is None:
                last = _Segment([], [], [])
                segments.append(last)
            self._extend(last, passed_on)
        elif passed_on:
            segments = [_Segment([], [], [])]
            self._extend(segments[0], passed_on)
        return segments

    def _is_torch(self, segment: _Segment) -> bool:
        return any(n in self._reasons for n in segment.nodes)

    def _segment(self, members: list[fx.Node], stage: dict[fx.Node, int], level: int) -> _Segment:
        inside = set(members)
        needed = _with_numbers(members, inside)
        order = [n for n in self._module.graph.nodes if n in inside or n in needed]
        everything = inside | needed
        inputs = [
            n
            for n in dict.fromkeys(itertools.chain.from_iterable(m.all_input_nodes for m in order))
            if n not in everything and n.op != "get_attr"
        ]
        wanted = set(self._outputs)
        outputs = [n for n in members if n in wanted or any(stage.get(user, level) != level for user in n.users)]
        # a number that a later segment needs is computed there again; a tensor behind it must be handed over
        for n in members:
            if n not in outputs and any(_reaches_other_stage(user, stage, level) for user in n.users if is_number(user)):
                outputs.append(n)
        return _Segment(order, inputs, [n for n in outputs if not isinstance(n.meta["val"], (tuple, list))])

    def _extend(self, segment: _Segment, results: set[fx.Node]) -> None:
        needed = _with_numbers(list(results), set(segment.nodes))
        fresh = {n for n in needed | {r for r in results if r.op == "call_function"} if n not in segment.nodes}
        everything = set(segment.nodes) | fresh
        segment.nodes = [n for n in self._module.graph.nodes if n in everything]
        reads = itertools.chain.from_iterable(m.all_input_nodes for m in segment.nodes)
        for n in itertools.chain(reads, [r for r in results if r.op == "placeholder"]):
            if n not in everything and n not in segment.inputs and n.op != "get_attr":
                segment.inputs.append(n)
        segment.outputs += [r for r in self._outputs if r in results]

    # -- compilation ----------------------------------------------------------------------------------------------

    def _compile(self, segments: list[_Segment]) -> list[Callable[[list[Any]], None]]:
        inputs = len(self._inputs)
        # a result that is an input as it stands is copied: it is read from one slot and written to another
        writes: dict[fx.Node, Slot] = {n: inputs + i for i, n in enumerate(self._outputs)}
        for segment in segments:
            for node in segment.outputs:
                writes.setdefault(node, inputs + len(writes))
        reads = writes | {n: i for i, n in enumerate(self._inputs)}
        self._n_inner = len(writes) - len(self._outputs)
        self.models = []
        steps = []
        for segment in segments:
            build = self._torch_step if self._is_torch(segment) else self._ort_step
            steps.append(build(segment, reads, writes))
        return steps

    def _torch_step(self, segment: _Segment, slots: Slots, written: Slots) -> Callable[[list[Any]], None]:
        graph = fx.Graph()
        copies = {n: graph.placeholder(n.name) for n in segment.inputs}
        for node in segment.nodes:
            copies[node] = graph.node_copy(node, lambda n: copies[n] if n in copies else _attribute(graph, n, copies))
        graph.output([copies[n] for n in segment.outputs])
        module = fx.GraphModule(self._module, graph)
        reads, writes = [slots[n] for n in segment.inputs], [written[n] for n in segment.outputs]

        def step(values: list[Any]) -> None:
            results = module(*[values[i] for i in reads])
            for i, result in zip(writes, results, strict=True):
                if values[i] is None:
                    values[i] = result
                else:  # an output of the plan, allocated ahead
                    values[i].copy_(result)

        return step

    def _ort_step(self, segment: _Segment, slots: Slots, written: Slots) -> Callable[[list[Any]], None]:
        session, inputs = self._session(segment)
        reads, writes = [slots[n] for n in inputs], [written[n] for n in segment.outputs]
        numbers = {slots[n]: torch.int64 if isinstance(n.meta["val"], (torch.SymInt, int)) else torch.float64
                   for n in inputs if is_number(n)}  # fmt: skip
        ahead = set(self._outputs)
        inner = [n for n in segment.outputs if n not in ahead]
        allocate, inner_slots = self._allocator(inner), [written[n] for n in inner]
        n_inputs, device = len(self._inputs), self._device

        def step(values: list[Any]) -> None:
            if inner_slots:
                for i, tensor in zip(inner_slots, allocate(values[:n_inputs]), strict=True):
                    values[i] = tensor
            feeds = [values[i] for i in reads]
            if numbers:
                for k, i in enumerate(reads):
                    if i in numbers:
                        data = [values[i]] if numbers[i] == torch.int64 else values[i]
                        feeds[k] = torch.tensor(data, dtype=numbers[i], device=device)
            session.run(feeds, [values[i] for i in writes])

        return step

    def _session(self, segment: _Segment) -> tuple[OrtSession, list[fx.Node]]:
        builder = GraphBuilder()
        by_name = {n.name: n for n in segment.nodes}
        used = set(itertools.chain.from_iterable(n.all_input_nodes for n in segment.nodes)) | set(segment.outputs)
        inputs = [n for n in segment.inputs if n in used]
        for node in inputs:
            builder.add_input(node)
        for node in self._module.graph.nodes:
            if node.op == "get_attr" and node in used:
                builder.add_initializer(node, _resolve(self._module, node.target))
        for node in segment.nodes:
            try:
                if not _all_supported(node):
                    raise NotLowered(f"its result is of {_dtypes(node)}, which ONNX Runtime does not take")
                builder.lower(node)
            except NotLowered as reason:
                raise _Rejected(_owner(node), str(reason)) from None
        model = optimize(builder.model(segment.outputs))
        live = {v.name for v in model.graph.inputs}
        inputs = [n for n in inputs if n.name in live]
        try:
            session = OrtSession(ir.to_proto(model).SerializeToString(), self._config, self._device)
        except Exception as error:
            node = _blamed(str(error), by_name)
            if node is None:
                raise
            raise _Rejected(_owner(node), _first_line(str(error))) from error
        self.models.append(model)
        return session, inputs

    def _allocator(self, nodes: Sequence[fx.Node]) -> Callable[[Sequence[Any]], list[torch.Tensor]]:
        """Function from the inputs of a run to fresh tensors for ``nodes``."""
        vals = [n.meta["val"] for n in nodes]
        shapes = [tuple(v.shape) if isinstance(v, torch.Tensor) else (1,) * isinstance(v, (torch.SymInt, int)) for v in vals]
        dtypes = [v.dtype if isinstance(v, torch.Tensor) else torch.int64 if isinstance(v, (torch.SymInt, int)) else torch.float64 for v in vals]  # fmt: skip
        evaluators = [self._sizes.evaluator(s) for s in shapes]
        device, empty = self._device, torch.empty
        parts = list(zip(evaluators, dtypes, strict=True))

        def allocate(inputs: Sequence[Any]) -> list[torch.Tensor]:
            return [empty(size(inputs), dtype=dtype, device=device) for size, dtype in parts]

        return allocate

    # -- execution ------------------------------------------------------------------------------------------------

    def drawer(self, draws: Sequence[fx.Node]) -> Callable[[Sequence[Any]], list[torch.Tensor]]:
        """Function from the inputs of a run to the random tensors of ``draws``, drawn in that order."""
        steps = []
        for node in draws:
            target, layout, args, kwargs = node.meta["draw"]
            flat, spec = pytree.tree_flatten((args, kwargs))
            values = [_draw_argument(a) for a in flat]
            numbers = [v for v in values if not isinstance(v, _Opaque)]
            geometry = self._sizes.evaluator([*layout.shape, *layout.stride(), *numbers])
            steps.append((DRAWS[target], layout.dim(), layout.dtype, geometry, values, spec))
        device = self._device

        def draw(inputs: Sequence[Any]) -> list[torch.Tensor]:
            drawn = []
            for function, rank, dtype, geometry, values, spec in steps:
                found = geometry(inputs)
                rest = iter(found[2 * rank :])
                flat = [v.value if isinstance(v, _Opaque) else next(rest) for v in values]
                args, kwargs = pytree.tree_unflatten(flat, spec)
                drawn.append(function(found[:rank], found[rank : 2 * rank], dtype, device, *args, **kwargs))
            return drawn

        return draw

    def run(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        """Compute ``outputs`` (from :attr:`allocate`, or tensors like them) from ``inputs``."""
        values = [*inputs, *outputs, *([None] * self._n_inner)]
        for step in self._steps:
            step(values)


@dataclasses.dataclass(frozen=True)
class _Opaque:
    """An argument of a draw that is the same in every run."""

    value: Any


def _draw_argument(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        # a tensor is there for its shape only
        return argument.meta["val"] if is_number(argument) else _Opaque(None)
    return _Opaque(argument)


class _Rejected(Exception):
    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


_getitem = operator.getitem


def _tensor_sources(node: fx.Node) -> set[fx.Node]:
    """Tensors that ``node`` reads, directly or through the numbers it reads."""
    found: set[fx.Node] = set()
    for source in node.all_input_nodes:
        if is_number(source):
            found |= _tensor_sources(source)
        else:
            found.add(source)
    return found


def _with_numbers(members: Sequence[fx.Node], inside: set[fx.Node]) -> set[fx.Node]:
    """Numbers that ``members`` need; every segment computes those for itself."""
    needed: set[fx.Node] = set()
    pending = list(members)
    while pending:
        for source in pending.pop().all_input_nodes:
            if is_number(source) and source.op == "call_function" and source not in needed and source not in inside:
                needed.add(source)
                pending.append(source)
    return needed


def _reaches_other_stage(number: fx.Node, stage: dict[fx.Node, int], level: int) -> bool:
    return any(
        _reaches_other_stage(user, stage, level) if is_number(user) else stage.get(user, -1) != level
        for user in number.users
    )


def _owner(node: fx.Node) -> fx.Node:
    """The call that produces ``node``, when ``node`` only picks one of its results."""
    return node.args[0] if node.target is _getitem and isinstance(node.args[0], fx.Node) else node


def _attribute(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    assert node.op == "get_attr", node
    copies[node] = graph.get_attr(str(node.target))
    return copies[node]


def _resolve(module: torch.nn.Module, path: Any) -> Any:
    for part in str(path).split("."):
        module = getattr(module, part)
    return module


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    val = node.meta.get("val")
    return [v for v in (val if isinstance(val, (tuple, list)) else [val]) if isinstance(v, torch.Tensor)]


def _all_supported(node: fx.Node) -> bool:
    return all(is_supported(v.dtype) for v in _tensors(node))


def _dtypes(node: fx.Node) -> str:
    return ", ".join(sorted({str(v.dtype) for v in _tensors(node)}))


def _blamed(message: str, by_name: dict[str, fx.Node]) -> fx.Node | None:
    """The fx node that ONNX Runtime complains about: ONNX nodes are named after the fx node they come from."""
    for name in re.findall(r"([A-Za-z_]\w*)/\w+_\d+", message):
        if name in by_name:
            return by_name[name]
    return None


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0] if message.strip() else "refused by ONNX Runtime"


def source_line(node: fx.Node) -> str:
    """``file:line, code`` of the user's call behind an fx node, or an empty string."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines()]
    for i in range(len(lines) - 1, -1, -1):
        match = re.match(r'File "(.+)", line (\d+), in (\S+)', lines[i])
        if match:
            code = lines[i + 1] if i + 1 < len(lines) else ""
            return f"{match[1]}:{match[2]}: {code}"
    return ""
