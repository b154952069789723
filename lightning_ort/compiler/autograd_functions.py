"""What users tell autograd: ``torch.autograd.Function``, whose gradients may be differentiated, and hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.autograd_function import autograd_function_apply
from torch.autograd.function import once_differentiable

__all__ = ["as_autograd_knows_it", "calls_function"]

_OPTIONS = {"non_differentiable_idx", "saved_for_backward_idx"}
_RECORDED = "recorded"
"""in ``meta`` of a backward graph: what comes of it here"""
_SET_GRAD = torch._C._set_grad_enabled
_ONCE = inspect.getsourcefile(once_differentiable) or ""
"""the file of its wrapper, which is on the way to what it calls, and nothing else of that file is"""


def as_autograd_knows_it(region: fx.GraphModule) -> None:
    """Have each ``Function`` in Dynamo's graph, and in graphs that this one calls, keep what eager keeps.

    Dynamo has two graphs for a function, forward and backward, and an operator that calls them. It computes gradients
    without a record of how, and hands over what ``forward`` saves as plain values: a gradient of the gradient (a
    penalty of gradients, forces of an energy) would lack all that comes by way of the function, without an error.

    And a hook of a tensor is left out where the graph is run without gradients, of which there is none to hook.
    """
    for module in region.modules():
        if isinstance(module, fx.GraphModule):
            calls = module.graph.find_nodes(op="call_function", target=autograd_function_apply)
            calls = [n for n in calls if n.kwargs.keys() >= _OPTIONS]  # an older torch may know others
            for node in calls:
                node.target = _apply
            hooks = [n for n in module.graph.nodes if n.op == "call_function" and str(n.target) == "register_hook"]
            for node in hooks:
                node.args, node.target = (node.target, *node.args), _hooked
            if calls or hooks:
                module.recompile()


def calls_function(node: fx.Node) -> bool:
    """Whether ``node`` of Dynamo's graph applies a ``Function``, itself or in a graph that it calls."""
    if node.target in (_apply, autograd_function_apply):
        return True
    root = node.graph.owning_module
    bodies = [getattr(root, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr"]
    return any(calls_function(n) for b in bodies if isinstance(b, fx.GraphModule) for n in b.graph.nodes)


def _apply(forward: fx.GraphModule, backward: fx.GraphModule, *args: Any, **options: Any) -> Any:
    """Apply the function of these two graphs.

    Args:
        forward: from ``args`` to a pair: the results, and what ``backward`` reads.
        backward: from the gradients of the results, and what it reads, to those of ``args``.
        args: of ``forward``.
        options: which results are not differentiable, which are changed arguments, and which of what ``backward``
            reads was given to ``save_for_backward``.
    """
    inert, dirty = options["non_differentiable_idx"], options.get("dirty_idx", ())
    checked = set(options["saved_for_backward_idx"])
    computed: Sequence[Any] = ()
    if _RECORDED not in backward.meta:
        backward.meta[_RECORDED] = (*_recorded(backward), _origins(forward))
    run, twice, origins = backward.meta[_RECORDED]

    class Applied(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            nonlocal computed
            results, computed = fx.Interpreter(forward).run(*args)
            return results

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if dirty:
                ctx.mark_dirty(*(output[i] for i in dirty))
            if inert:
                ctx.mark_non_differentiable(*(output[i] for i in inert))
            kept = [
                value if origin is None else (inputs, output)[origin[0]][origin[1]]
                for value, origin in zip(computed, origins, strict=True)
            ]
            # what was put on ctx as an attribute may be changed in between
            ctx.save_for_backward(*(x for i, x in enumerate(kept) if i in checked))
            ctx.others = [None if i in checked else x for i, x in enumerate(kept)]

        @staticmethod
        def backward(ctx: Any, *incoming: Any) -> Any:
            # a function that has saved nothing has nothing to be freed: its backward may run again
            saved = iter(ctx.saved_tensors if checked else ())
            read = [next(saved) if i in checked else x for i, x in enumerate(ctx.others)]
            return run(*incoming, *read)

    if not twice:
        Applied.backward = staticmethod(once_differentiable(Applied.backward))  # type: ignore[method-assign,assignment]
    return Applied.apply(*args)


def _hooked(register: Callable[..., Any], x: torch.Tensor, hook: fx.GraphModule, *reads: Any) -> torch.Tensor:
    return register(x, hook, *reads) if x.requires_grad else x


def _origins(forward: fx.GraphModule) -> list[tuple[int, int] | None]:
    """Per value that is kept, where autograd knows it from: input (0) or result (1), and the number of it."""
    results, kept = forward.graph.output_node().args[0]
    known = {x: (0, i) for i, x in enumerate(forward.graph.find_nodes(op="placeholder"))}
    known |= {x: (1, i) for i, x in enumerate(results) if isinstance(x, fx.Node)}
    return [known.get(x) if isinstance(x, fx.Node) else None for x in kept]


def _recorded(backward: fx.GraphModule) -> tuple[Callable[..., Any], bool]:
    """``backward`` under the grad mode it is called in, and whether what it computes can be differentiated.

    Dynamo has written it for a mode without gradients: it begins with leaving theirs, and a block of the user's that
    turns them on (a pair of changes) ends with no gradients.
    """
    if any(_ONCE in node.meta.get("stack_trace", "") for node in backward.graph.nodes):
        return fx.Interpreter(backward).run, False
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(backward.graph, copies)
    graph.output(output)
    modes = graph.find_nodes(op="call_function", target=_SET_GRAD)
    if [n.args[0] for n in modes[:1] + modes[-1:]] != [False, True]:
        return fx.Interpreter(backward).run, False
    for node in (modes[0], modes[-1]):
        graph.erase_node(node)
    inner = modes[1:-1]
    if len(inner) % 2 or any(n.args[0] is not False for n in inner[1::2]):
        return fx.Interpreter(backward).run, False
    for before, after in zip(inner[::2], inner[1::2], strict=True):
        with graph.inserting_before(before):
            present = graph.call_function(torch.is_grad_enabled)
        after.args = (present,)
    return fx.Interpreter(fx.GraphModule(backward, graph)).run, True
