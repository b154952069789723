"""A joint graph cut into a forward graph and a backward graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.numbers import is_number
from lightning_ort.compiler.trace import Traced

__all__ = ["Partition", "split"]

aten = torch.ops.aten

# Cheaper to compute again from what is kept anyway than to keep as well.
_RECOMPUTED = {
    getattr(packet, overload)
    for packet in (
        aten.view, aten._unsafe_view, aten.reshape, aten.permute, aten.transpose, aten.t, aten.expand, aten.unsqueeze,
        aten.squeeze, aten.slice, aten.select, aten._to_copy, aten.eq, aten.ne, aten.gt, aten.ge, aten.lt, aten.le,
        aten.logical_not, aten.logical_and, aten.logical_or, aten.bitwise_and, aten.bitwise_or, aten.bitwise_not,
        aten.full, aten.full_like, aten.scalar_tensor, aten.arange, aten.zeros, aten.ones,
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
    """

    forward: Traced
    backward: Traced
    saved: list[fx.Node]
    kept: list[int | None]


def split(joint: Traced) -> Partition:
    """Cut ``joint`` so that the backward graph holds exactly what depends on incoming gradients."""
    graph = joint.graph
    backward: set[fx.Node] = set(joint.tangents.values())
    for node in graph.nodes:
        if node.op == "call_function" and any(source in backward for source in node.all_input_nodes):
            backward.add(node)
    results = {g for g in joint.gradients.values() if isinstance(g, fx.Node)}
    copied: set[fx.Node] = set()
    kept: dict[fx.Node, None] = {}
    pending = [n for n in graph.nodes if n in backward or n in results]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node.op == "placeholder" or (
            node not in backward and not is_number(node) and node.target not in _RECOMPUTED
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
    # sizes of the backward graph are computed from the region's own size inputs
    for placeholder in joint.inputs:
        if is_number(placeholder):
            kept.setdefault(placeholder)
    return _build(joint, copied, list(kept))


def _build(joint: Traced, copied: set[fx.Node], kept: list[fx.Node]) -> Partition:
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
    tangents = {mapping[t] for t in joint.tangents.values()}
    for placeholder in tangents:
        graph.erase_node(placeholder)
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
