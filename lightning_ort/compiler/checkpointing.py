"""Layers under ``torch.utils.checkpoint``, which computes their activations again when gradients are wanted."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx
from torch._guards import TracingContext
from torch._higher_order_ops.wrap import tag_activation_checkpoint

from lightning_ort.compiler.dynamo_words import name_of_source, user_frame

__all__ = ["CheckpointTracer", "as_in_eager", "first_draws"]


def as_in_eager(region: fx.GraphModule) -> None:
    """Have checkpointed layers in Dynamo's graph compute what they compute in eager.

    Dynamo's operator leaves it to a partitioner to compute activations again. Executed, it would draw other random
    numbers the second time, and refuse layers that change their own buffers.
    """
    nodes = region.graph.find_nodes(op="call_function", target=tag_activation_checkpoint)
    for node in nodes:
        body, *args = node.args
        state = tuple(i for i, a in enumerate(args) if isinstance(a, fx.Node) and _belongs_to_module(a))
        node.target, node.args = _checkpointed, (body, state, *args)
    if nodes:
        region.recompile()


def _belongs_to_module(node: fx.Node) -> bool:
    name = name_of_source(node)
    return "._buffers[" in name or "._parameters[" in name


@dataclasses.dataclass
class _Own:
    """A tensor that the layers hold themselves: no argument, so that its changes are nobody's error."""

    tensor: torch.Tensor


def _checkpointed(body: fx.GraphModule, state: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
    """The checkpoint in eager."""

    def run(*args: Any) -> Any:
        return body.forward(*_values(args))

    context = body.meta.get("_checkpoint_context_fn")
    options = kwargs | ({} if context is None else {"context_fn": context}) | {"use_reentrant": False}
    return torch.utils.checkpoint.checkpoint(run, *_held(state, args), **options)


def _held(state: tuple[int, ...], args: Iterable[Any]) -> list[Any]:
    return [_Own(a) if i in state else a for i, a in enumerate(args)]


def _values(args: Iterable[Any]) -> list[Any]:
    return [a.tensor if isinstance(a, _Own) else a for a in args]


_RUNS = itertools.count()


class CheckpointTracer(fx.Interpreter):
    """Executes a region to be traced; nodes of checkpointed layers say which execution they belong to.

    What is assumed of a size or a number on the way is an assumption of the user's line.
    """

    def run_node(self, n: fx.Node) -> Any:
        frame = user_frame(n)
        if frame is None:
            return super().run_node(n)
        with TracingContext.current_frame(frame):
            return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is not _checkpointed:
            return super().call_function(target, args, kwargs)
        body, state, *rest = args
        same_draws = kwargs.get("preserve_rng_state", True)
        key, turns = next(_RUNS), itertools.count()

        def run(*args: Any) -> Any:
            turn = next(turns)
            for node in body.graph.nodes:
                node.meta["custom"] = {"checkpoint": (key, turn)} if same_draws else {}
            return fx.Interpreter(body).run(*_values(args))

        return torch.utils.checkpoint.checkpoint(
            run, *_held(state, rest), use_reentrant=False, preserve_rng_state=False, early_stop=False
        )


def first_draws(draws: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Random calls for activations that are computed again, to the calls whose numbers those had the first time."""
    turns: dict[tuple[int, int], list[fx.Node]] = {}
    for node in draws:
        found = (node.meta.get("custom") or {}).get("checkpoint")
        if found is not None:
            turns.setdefault(found, []).append(node)
    return {node: turns[key, 0][i] for (key, turn), nodes in turns.items() if turn for i, node in enumerate(nodes)}
