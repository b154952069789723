"""A graph cut into segments, each for ONNX Runtime or for torch."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Collection, Sequence

from torch import fx

from lightning_ort.compiler.numbers import is_number

__all__ = ["Placement", "Segment"]


@dataclasses.dataclass
class Segment:
    """A part of a graph that one engine executes."""

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    in_torch: bool


class Placement:
    """Cuts ``graph`` so that as few segments as possible hold the nodes ``in_torch`` and all others apart.

    Nodes are put on levels, even ones for ONNX Runtime and odd ones for torch: a node is as low as what it reads
    allows. Numbers are on no level; every segment computes those it needs.

    Args:
        graph: a functional graph.
        outputs: nodes whose values are wanted.
        in_torch: calls that torch has to execute.
    """

    def __init__(self, graph: fx.Graph, outputs: Sequence[fx.Node], in_torch: Collection[fx.Node]) -> None:
        self._graph, self._outputs, self._in_torch = graph, list(outputs), in_torch

    def segments(self) -> list[Segment]:
        """All segments, in the order in which they run."""
        stage: dict[fx.Node, int] = {}
        for node in self._graph.nodes:
            if node.op != "call_function" or is_number(node):
                continue
            if node.target is operator.getitem:
                stage[node] = stage[node.args[0]]
                continue
            in_torch = node in self._in_torch
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
            last = max((s for s in segments if not s.in_torch), key=segments.index, default=None)
            if last is None:
                last = Segment([], [], [], in_torch=False)
                segments.append(last)
            self._extend(last, passed_on)
        elif passed_on:
            segments = [Segment([], [], [], in_torch=False)]
            self._extend(segments[0], passed_on)
        return segments

    def _segment(self, members: list[fx.Node], stage: dict[fx.Node, int], level: int) -> Segment:
        inside = set(members)
        needed = _with_numbers(members, inside)
        order = [n for n in self._graph.nodes if n in inside or n in needed]
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
            if n not in outputs and any(
                _reaches_other_stage(user, stage, level) for user in n.users if is_number(user)
            ):
                outputs.append(n)
        results = [n for n in outputs if not isinstance(n.meta["val"], (tuple, list))]
        return Segment(order, inputs, results, in_torch=bool(level % 2))

    def _extend(self, segment: Segment, results: set[fx.Node]) -> None:
        needed = _with_numbers(list(results), set(segment.nodes))
        fresh = {n for n in needed | {r for r in results if r.op == "call_function"} if n not in segment.nodes}
        everything = set(segment.nodes) | fresh
        segment.nodes = [n for n in self._graph.nodes if n in everything]
        reads = itertools.chain.from_iterable(m.all_input_nodes for m in segment.nodes)
        for n in itertools.chain(reads, [r for r in results if r.op == "placeholder"]):
            if n not in everything and n not in segment.inputs and n.op != "get_attr":
                segment.inputs.append(n)
        segment.outputs += [r for r in self._outputs if r in results]


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
