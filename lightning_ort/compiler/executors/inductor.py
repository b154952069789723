"""Graphs compiled by inductor, torch's own compiler, to C++: slower to compile than all else, and often the fastest."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

# what torch documents for graphs that Dynamo has not captured
from torch._inductor import compile as compile_graph

from lightning_ort.compiler.executors.executable import Results
from lightning_ort.compiler.executors.torch import TorchExecutable
from lightning_ort.compiler.functional_graph import Untraceable

__all__ = ["InductorExecutable"]


class InductorExecutable(TorchExecutable):
    """Draws the random numbers of a graph and computes its results in one function that inductor has compiled.

    Args, Raises: those of :class:`TorchExecutable`; Untraceable also where inductor cannot compile it.
    """

    executor = "inductor"

    def _function(self, module: fx.GraphModule, results: Results) -> Callable[[list[Any]], list[Any]]:
        whole = _whole(module, results)
        examples = [node.meta["val"] for node in results.inputs]
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what it says of its own parts is nothing to the user
                compiled = compile_graph(whole, examples)
        except Exception as error:
            reason = str(error).strip().splitlines()
            raise Untraceable(f"inductor: {type(error).__name__}: {reason[0] if reason else ''}") from error

        def compute(values: list[Any]) -> list[Any]:
            with torch.no_grad():
                return list(compiled(*values))

        return compute


def _whole(module: fx.GraphModule, results: Results) -> fx.GraphModule:
    """The graph with ``results`` as its outputs, and its inputs in their order."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in results.inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results.all))
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)
