"""A joint graph cut into a forward graph and a backward graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.eager_graph import EagerGraph
from lightning_ort.compiler.symbolic_shapes import is_number
from lightning_ort.compiler.trace import Traced

__all__ = ["Partition", "split"]

aten = torch.ops.aten

_VIEWS = {
    getattr(packet, overload)
    for packet in (
        aten.view, aten._unsafe_view, aten.reshape, aten.permute, aten.transpose, aten.t, aten.expand, aten.unsqueeze,
        aten.squeeze, aten.slice, aten.select,
    )
    for overload in packet.overloads()
}  # fmt: skip

# What these give does not depend on the values of what they read.
_FILLED = {
    getattr(packet, overload)
    for packet in (aten.full, aten.full_like, aten.scalar_tensor, aten.arange, aten.zeros, aten.ones)
    for overload in packet.overloads()
}

# Cheaper to compute again from what is kept anyway than to keep as well.
_RECOMPUTED = _VIEWS | _FILLED | {
    getattr(packet, overload)
    for packet in (
        aten._to_copy, aten.eq, aten.ne, aten.gt, aten.ge, aten.lt, aten.le,
        aten.logical_not, aten.logical_and, aten.logical_or, aten.bitwise_and, aten.bitwise_or, aten.bitwise_not,
    )
    for overload in packet.overloads()
}  # fmt: skip


@dataclasses.dataclass
class Partition:
    """Forward and backward as graphs of their own.

    Attributes:
        forward: gives the outputs, the updates and ``saved``.
        backward: takes the kept values as its inputs, and the incoming gradients as its tangents.
        saved: nodes of ``forward`` that the backward graph reads and that are not inputs of the region.
        kept: inputs of ``backward`` in order: a region input number, or ``None`` for the next of ``saved``.
        copied: those of the region inputs of which the value before the run has to be copied.
        own: those of ``saved`` that are outputs and have to be copied, as users may change them.
    """

    forward: Traced
    backward: Traced
    saved: list[fx.Node]
    kept: list[int | None]
    copied: frozenset[int]
    own: set[fx.Node]


def split(joint: Traced, eager: EagerGraph) -> Partition:
    """Cut ``joint`` so that the backward graph holds exactly what depends on incoming gradients.

    What may change before the gradients come, an input or an output, is read again by the backward graph where eager
    keeps it by reference, and would refuse the gradients then. Otherwise the backward graph reads what was computed
    from it, as eager does, or a copy.
    """
    arrived = _arrived(joint)
    copied, kept = _needed(joint, arrived, set())
    changeable = _changeable(joint, eager, arrived, copied, kept)
    if changeable:
        copied, kept = _needed(joint, arrived, changeable)
    # sizes of the backward graph are computed from the region's own size inputs
    for placeholder in joint.inputs:
        if is_number(placeholder):
            kept.setdefault(placeholder)
    return _build(joint, copied, list(kept), changeable)


def _arrived(joint: Traced) -> dict[fx.Node, frozenset[int]]:
    """Nodes that depend on incoming gradients, with the numbers of the outputs at which those arrive."""
    arrived = {node: frozenset([output]) for output, node in joint.tangents.items()}
    for node in joint.graph.nodes:
        if node.op == "call_function":
            outputs = frozenset[int]().union(*[arrived.get(source, ()) for source in node.all_input_nodes])
            if outputs:
                arrived[node] = outputs
    return arrived


def _needed(
    joint: Traced, backward: Collection[fx.Node], changeable: Collection[fx.Node]
) -> tuple[set[fx.Node], dict[fx.Node, None]]:
    """Nodes of the backward graph, and the values that it reads."""
    results = {g for g in joint.gradients.values() if isinstance(g, fx.Node)}
    copied: set[fx.Node] = set()
    kept: dict[fx.Node, None] = {}
    pending = [n for n in joint.graph.nodes if n in backward or n in results]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node.op == "placeholder" or (
            node not in backward and not is_number(node) and not _computed_again(node, changeable)
        ):
            if node.op == "get_attr":
                copied.add(node)
            elif node not in backward:
                kept[node] = None
            continue
        copied.add(node)
        fresh = [s for s in node.all_input_nodes if s not in seen]
        seen.update(fresh)
        pending += fresh
    return copied, kept


def _computed_again(node: fx.Node, changeable: Collection[fx.Node]) -> bool:
    if node.target not in _RECOMPUTED or node in changeable:
        return False
    return node.target in _FILLED or node.target in _VIEWS or not _comes_from(node, changeable)


def _comes_from(node: fx.Node, changeable: Collection[fx.Node]) -> bool:
    """Whether what is computed again for ``node`` starts from something ``changeable``."""
    pending, seen = [node], {node}
    while pending:
        node = pending.pop()
        if node in changeable:
            return True
        if node.target in _RECOMPUTED and node.target not in _FILLED:
            fresh = [s for s in node.all_input_nodes if s not in seen]
            seen.update(fresh)
            pending += fresh
    return False


def _changeable(
    joint: Traced,
    eager: EagerGraph,
    arrived: Mapping[fx.Node, frozenset[int]],
    copied: Collection[fx.Node],
    kept: Collection[fx.Node],
) -> set[fx.Node]:
    """Inputs and outputs among ``kept`` that eager's gradients do not read, but something of its own."""
    inputs = {n: i for i, n in enumerate(joint.inputs)}
    found = set()
    for node in kept:
        outputs = [i for i, o in enumerate(joint.outputs) if o is node]
        if is_number(node) or (node not in inputs and not outputs):
            continue
        readers = _readers(node, arrived, copied)
        written = inputs.get(node) in joint.updates
        by_reference = not written and all(
            inputs.get(node) in eager.saved[r] or any(o in eager.saved_outputs[r] for o in outputs) for r in readers
        )
        if not by_reference:
            found.add(node)
    return found


def _readers(node: fx.Node, arrived: Mapping[fx.Node, frozenset[int]], copied: Collection[fx.Node]) -> set[int]:
    """Outputs whose gradients are computed from the value of ``node``."""
    readers: set[int] = set()
    pending, seen = [node], set()
    while pending:
        for user in pending.pop().users:
            if user in seen or user not in copied or user.target in _FILLED or is_number(user):
                continue
            seen.add(user)
            if user in arrived:
                readers |= arrived[user]
            else:
                pending.append(user)
    return readers


def _build(joint: Traced, copied: set[fx.Node], kept: list[fx.Node], changeable: Collection[fx.Node]) -> Partition:
    index = {n: i for i, n in enumerate(joint.inputs)}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in [*kept, *joint.tangents.values()]:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    inputs = [copies[n] for n in kept]
    for node in joint.graph.nodes:
        if node in copied and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    gradients = {i: copies[g] if isinstance(g, fx.Node) else None for i, g in joint.gradients.items()}
    graph.output(([], [g for g in gradients.values() if g is not None], []))
    backward = Traced(
        module=fx.GraphModule(joint.module, graph),
        inputs=inputs,
        tangents={i: copies[t] for i, t in joint.tangents.items()},
        draws=[],
        outputs=[],
        gradients=gradients,
        updates={},
    )
    forward, mapping = _forward(joint, [n for n in kept if n not in index])
    return Partition(
        forward=forward,
        backward=backward,
        saved=[mapping[n] for n in kept if n not in index],
        kept=[index.get(n) for n in kept],
        copied=frozenset(index[n] for n in kept if n in index and n in changeable),
        own={mapping[n] for n in kept if n not in index and n in changeable},
    )


def _forward(joint: Traced, saved: list[fx.Node]) -> tuple[Traced, dict[fx.Node, fx.Node]]:
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(joint.graph, mapping)

    def moved(value: Any) -> Any:
        return mapping[value] if isinstance(value, fx.Node) else value

    outputs = [moved(o) for o in joint.outputs]
    updates = {i: mapping[n] for i, n in joint.updates.items()}
    graph.output((outputs, [mapping[n] for n in saved], list(updates.values())))
    graph.eliminate_dead_code()
    # assertions about gradients are not dead, and nothing of this graph
    arrived = {mapping[t] for t in joint.tangents.values()}
    for node in graph.nodes:
        if not arrived.isdisjoint(node.all_input_nodes):
            arrived.add(node)
    for node in reversed(graph.nodes):
        if node in arrived:
            graph.erase_node(node)
    traced = Traced(
        module=fx.GraphModule(joint.module, graph),
        inputs=[mapping[n] for n in joint.inputs],
        tangents={},
        draws=[mapping[n] for n in joint.draws],
        outputs=outputs,
        gradients={},
        updates=updates,
    )
    return traced, mapping
