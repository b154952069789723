"""Graphs that end at ``torch.autograd.grad``, where one result may be differentiated by another one.

To autograd all results of a region are siblings, made by one function: what ``autograd.grad(loss, h)`` asks for is
unknown, or ``None``, where the region gives ``loss`` and also the ``h`` that it is computed from. Such a graph is cut
behind ``h``, and its parts are regions one after the other. Examples: the second inner step of meta-learning (MAML),
forces from an energy that is summed up, a gradient penalty at what is computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from lightning_ort.compiler.functional_graph import Untraceable, is_named_in_place
from lightning_ort.runtime.memory import storage_key

__all__ = ["cut_at_results", "run_in_parts"]

_SWITCHES = re.compile(r"_set_grad_enabled|_(enter|exit)_autocast|_\w+_(in|de)crement_nesting")


def cut_at_results(graph: fx.GraphModule) -> fx.GraphModule | None:
    """The graph with a submodule for each of its parts, or ``None`` where it is right as a whole.

    Raises:
        Untraceable: settings of torch change on the way, which a part would not know of, or a result behind the cut.
    """
    reason = getattr(graph, "compile_subgraph_reason", None)  # Dynamo's, of the break that the graph ends at
    if reason is None or "`torch.autograd.grad`" not in reason.reason:
        return None
    (results,) = graph.graph.output_node().args
    assert isinstance(results, (list, tuple))
    outputs: set[fx.Node] = set()
    for result in results:
        if isinstance(result, fx.Node) and _has_gradient(result):
            outputs.update(_names_of(result))
    part: dict[fx.Node, int] = {}
    made_in: dict[Any, int] = {}  # memory to the part that has it first
    last, behind_a_cut = 0, False
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            if _has_gradient(node):
                made_in[_memory(node)] = 0
            continue
        changed = _changed_by(node)
        # never before the node that comes before it: changes in place keep their order
        behind = (part[n] + (n in outputs and n is not changed) for n in node.all_input_nodes if n in part)
        part[node] = last = max([last, *behind])
        if changed in outputs:
            outputs.add(node)  # under another name
        # what autograd knows of a tensor is its last state, and a part before would be told of it
        behind_a_cut |= changed is not None and made_in.get(_memory(changed), last) < last
        if changed is None and _memory(node) is not None:
            made_in.setdefault(_memory(node), last)
    if not last:
        return None
    if any(_SWITCHES.fullmatch(getattr(node.target, "__name__", "")) for node in part):
        raise Untraceable(
            "torch.autograd.grad follows, which could ask for the gradient of one of its results by another one, and "
            "autocast, whether gradients are on, or a transform of torch.func changes on the way"
        )
    if behind_a_cut:
        raise Untraceable("torch.autograd.grad follows, and a tensor is changed in place behind what may be asked for")
    return split_module(graph, nn.Module(), part.__getitem__)


def run_in_parts(
    parts: fx.GraphModule, compiled: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """What runs the parts one after the other, each as ``compiled(part, example inputs)`` runs it."""
    for name, part in list(parts.named_children()):
        assert isinstance(part, fx.GraphModule)
        output = part.graph.output_node()
        (results,) = output.args
        alone = not isinstance(results, (list, tuple))
        if alone:
            output.args = ((results,),)
            part.recompile()
        examples = [n.meta["example_value"] for n in part.graph.nodes if n.op == "placeholder"]
        setattr(parts, name, _Part(compiled(part, examples), alone))
    return parts.forward


class _Part(nn.Module):
    def __init__(self, run: Callable[..., Any], alone: bool) -> None:
        super().__init__()
        self._run, self._alone = run, alone

    def forward(self, *args: Any) -> Any:
        results = self._run(*args)
        return results[0] if self._alone else results


def _changed_by(node: fx.Node) -> fx.Node | None:
    """The tensor that this changes in place, as far as its name tells."""
    changed = node.kwargs.get("out", node.args[0] if node.args else None) if is_named_in_place(node) else None
    return changed if isinstance(changed, fx.Node) else None


def _memory(node: fx.Node) -> Any:
    value = node.meta.get("example_value")
    try:
        return storage_key(value) if isinstance(value, torch.Tensor) else None
    except NotImplementedError:  # within a transform of torch.func
        return None


def _names_of(result: fx.Node) -> Iterator[fx.Node]:
    """The nodes that give the very tensor that ``result`` is, as ``h`` does if that is ``h.contiguous()``."""
    node: fx.Node | None = result
    while node is not None and node.op != "placeholder":
        yield node
        value = node.meta["example_value"]
        before = () if is_named_in_place(node) else node.all_input_nodes
        node = next((n for n in before if n.meta.get("example_value") is value), None)


def _has_gradient(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad
