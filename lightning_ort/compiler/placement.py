"""A graph cut into segments, each for ONNX Runtime or for torch."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.symbolic_shapes import hint, is_number
from lightning_ort.runtime.factory import SessionFactory
from lightning_ort.runtime.providers.provider import Provider
from lightning_ort.runtime.tensors import is_supported

__all__ = ["SMALL", "Placement", "Segment", "better_in_torch", "is_foreign", "is_of_nothing", "operations"]


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
        # numbers and untouched inputs that are results are computed by the last segment of ONNX Runtime, if it can
        passed_on = {n for n in self._outputs if n not in stage}
        foreign = {n for n in passed_on if not all(is_supported(t.dtype) for t in _tensors([n]))}
        for in_torch, results in ((False, passed_on - foreign), (True, foreign)):
            if not results:
                continue
            last = next((s for s in reversed(segments) if s.in_torch == in_torch), None)
            if last is None:
                last = Segment([], [], [], in_torch=in_torch)
                segments.append(last)
            self._extend(last, results)
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


def is_foreign(node: fx.Node) -> bool:
    """Whether somebody else's code computes ``node``, or a graph of its own does."""
    is_operator = isinstance(node.target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))
    # those of this package stand for torch's in graphs of ONNX Runtime, or are written in torch's functions
    return is_operator and getattr(node.target, "namespace", "") not in ("aten", "prims", "lightning_ort")


aten = torch.ops.aten

SMALL = 2e7
"""Operations below which a second thread costs more than it gains: waking it takes as long as the work (measured on
networks of 1 to 80 million operations, 2 cores)."""


def operations(nodes: Iterable[fx.Node]) -> float:
    """Floating-point operations of the products and convolutions, plus one per entry of every other result."""
    return sum(_operations(node) for node in nodes)


def _operations(node: fx.Node) -> float:
    val = node.meta.get("val")
    if node.target is aten.convolution_backward.default:
        # the weight's gradient takes as much as the forward pass, and so does the image's
        return sum(node.args[-1][:2]) * _convolution(_fake(node.args[0]), _fake(node.args[2]), node.args[7])
    if node.op != "call_function" or not isinstance(val, torch.Tensor):
        return 0.0
    size = _entries(val)
    if node.target in (aten.mm.default, aten.bmm.default):
        return 2 * size * hint(_fake(node.args[0]).shape[-1])
    if node.target in (aten.addmm.default, aten.baddbmm.default):
        return 2 * size * hint(_fake(node.args[1]).shape[-1])
    if node.target is aten.convolution.default:
        return _convolution(val, _fake(node.args[1]), node.args[6])
    return size


def _convolution(result: torch.Tensor, weight: torch.Tensor, transposed: Any) -> float:
    # each entry of the result sums over a filter; in a transposed convolution the weight's second size are the results
    filters = hint(weight.shape[1 if transposed else 0])
    return 2 * _entries(result) * _entries(weight) / max(filters, 1)


def _fake(argument: Any) -> torch.Tensor:
    return argument.meta["val"]


def _entries(fake: torch.Tensor) -> float:
    return math.prod((hint(size) for size in fake.shape), start=1.0)


_BACKWARD = aten.convolution_backward.default

_GROUPED = 0.1
"""Share of the operations from which a convolution is large that is enough for one with groups. A convolution of single
pixels is a matrix product, in which ONNX Runtime is the faster one or as fast."""


_RANKED = {
    aten.topk.default, aten.kthvalue.default, aten.median.dim, aten.nanmedian.dim, aten.sort.default, aten.sort.stable,
}  # fmt: skip


def better_in_torch(graph: fx.Graph, sessions: SessionFactory) -> set[fx.Node]:
    """Calls of ``graph`` to place in torch for speed, for their choice among equals, or because there is nothing to do.

    ONNX Runtime's kernels, and the rewriting that it does before it runs them, are not made for tensors without entries
    (an ``Expand`` to no rows is left out, say), and a session for none would be made in vain.

    Which of several equal numbers is the k-th is up to the algorithm; positions, and the gradients that go there, are
    torch's with torch's own, also where everything else is to be ONNX Runtime's. Where only the values are read, and
    where a sort is stable, there is nothing to choose.

    On the CPU, those for speed are large convolutions in float32, forward and backward: torch's come from oneDNN, which
    computes in blocked layouts, and ONNX Runtime has kernels like that for constant weights only. On a GPU they are
    the gradients of still larger ones, for which torch has those of cuDNN.
    """
    ranked = {n for n in graph.nodes if n.target in _RANKED and _chooses_among_equals(n)}
    if not sessions.config.by_speed:
        return ranked
    anyway = ranked | {n for n in graph.nodes if is_of_nothing(n)}
    return anyway | {n for n in graph.nodes if _is_better_convolution(n, sessions.provider)}


def is_of_nothing(node: fx.Node) -> bool:
    """Whether all that ``node`` gives, or what it reads first, is known to have no entries.

    Some operators have results and arguments by the side that are empty, such as BatchNorm's saved statistics.
    """
    if node.op != "call_function" or is_number(node) or node.target is operator.getitem:
        return False
    given, read = _tensors([node]), _tensors(node.all_input_nodes[:1])
    return (bool(given) and all(map(_is_empty, given))) or any(map(_is_empty, read))


def _tensors(nodes: Sequence[fx.Node]) -> list[torch.Tensor]:
    vals = [n.meta.get("val") for n in nodes]
    flat = [t for v in vals for t in (v if isinstance(v, (tuple, list)) else [v])]
    return [t for t in flat if isinstance(t, torch.Tensor)]


def _is_empty(tensor: torch.Tensor) -> bool:
    return any(isinstance(n, int) and n == 0 for n in tensor.shape)


def _chooses_among_equals(node: fx.Node) -> bool:
    """Whether positions that ``node`` gives are read, and are not settled by its definition."""
    x = node.args[0].meta["val"]
    if x.dim() == 0 or node.kwargs.get("stable"):
        return False
    return any(user.target is operator.getitem and user.args[1] == 1 and user.users for user in node.users)


def _is_better_convolution(node: fx.Node, provider: Provider) -> bool:
    """Whether torch has the better kernel for a convolution or its gradient, or the only one."""
    if provider.has_convolution_gradients:
        return _is_large_convolution(node, provider.large_convolution)
    if node.target not in (aten.convolution.default, _BACKWARD):
        return False
    dtype = node.all_input_nodes[0].meta["val"].dtype
    if dtype.itemsize < 4:
        return node.target is _BACKWARD or dtype == torch.bfloat16
    return node.target is _BACKWARD and _is_large_convolution(node, provider.large_convolution)


def _is_large_convolution(node: fx.Node, large: float) -> bool:
    if node.target is aten.convolution.default:
        weight, groups = node.args[1], node.args[8]
    elif node.target is _BACKWARD:
        weight, groups = node.args[2], node.args[9]
    else:
        return False
    if not isinstance(groups, int):  # a number of channels that changes
        return False
    tensors = [a.meta["val"] for a in node.args if isinstance(a, fx.Node) and not is_number(a)]
    if any(t.dtype != torch.float32 for t in tensors) or math.prod(weight.meta["val"].shape[2:]) == 1:
        return False
    return operations([node]) >= (large if groups == 1 else large * _GROUPED)
