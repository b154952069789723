"""Graphs run by torch with images whose channels lie next to each other, as oneDNN's convolutions like to have them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from lightning_ort.compiler.executors.executable import Results
from lightning_ort.compiler.executors.torch import TorchExecutable
from lightning_ort.compiler.symbolic_shapes import hint, is_number
from lightning_ort.compiler.trace import Traced

__all__ = ["CHANNELS_LAST", "ChannelsLastExecutable", "gains_by_channels_last"]

CHANNELS_LAST = "torch-channels-last"
"""what :class:`ChannelsLastExecutable` is called"""

aten = torch.ops.aten

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_BY_ADDRESS = {
    aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default,
    aten.view.dtype, aten.view_as_complex.default,
}  # fmt: skip


def gains_by_channels_last(traced: Traced) -> bool:
    """Whether ``traced`` has convolutions that this layout is for, and nobody could tell another layout by the results.

    What reads memory by address would read other entries; a result that is not contiguous would lie otherwise.
    """
    nodes = traced.graph.nodes
    formats = {_best_format(n, images) for n in nodes if (images := _images(n))}
    if formats <= {torch.contiguous_format} or any(n.target in _BY_ADDRESS for n in nodes):
        return False
    return all(_format(n) is not None for n in _results(traced))


class ChannelsLastExecutable(TorchExecutable):
    """As :class:`TorchExecutable`, with what convolutions read in ``torch.channels_last``.

    In the usual layout oneDNN rearranges what a convolution reads and writes, each time. Here that is done once, where
    the data come in: torch's kernels pass the layout on. Results have the layout that eager gives them.

    Args, Raises: those of :class:`TorchExecutable`; ``traced`` is one that :func:`gains_by_channels_last`.
    """

    executor = CHANNELS_LAST

    def _compile(self, traced: Traced, results: Results) -> None:
        _lay_out(traced.graph)
        super()._compile(traced, results.replaced(_as_in_eager(traced)))


def _images(node: fx.Node) -> list[int]:
    """Positions of the images among the arguments of a convolution or its gradient, and of its weight at the end."""
    if node.target is aten.convolution.default:
        positions = [0, 1]
    elif node.target is aten.convolution_backward.default:
        positions = [0, 1, 2]
    else:
        return []
    fake = node.args[0].meta["val"]
    return positions if fake.dim() in _FORMATS and fake.dtype.itemsize <= 4 else []


def _best_format(node: fx.Node, images: Sequence[int]) -> torch.memory_format:
    """The layout for a convolution with those ``images``.

    It is the usual one where there are as many weights: they are brought into the layout, and their gradients out of
    it, in each run.
    """
    *given, weight = [node.args[i].meta["val"] for i in images]
    if len(given) == 1:
        given.append(node.meta["val"])
    return _FORMATS[weight.dim()] if _entries(given) > 2 * _entries([weight]) else torch.contiguous_format


def _entries(fakes: Iterable[torch.Tensor]) -> int:
    return sum(math.prod(map(hint, fake.shape)) for fake in fakes)


def _lay_out(graph: fx.Graph) -> None:
    """Have the images of ``graph`` laid out before convolutions read them; most lie that way already.

    Weights are by the convolution, or it would lay them out again for its gradient.
    """
    laid_out: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}
    for node in list(graph.nodes):
        images = _images(node)
        if not images:
            continue
        layout = _best_format(node, images)
        for position in images:
            key = read, layout = node.args[position], layout
            if key not in laid_out:
                with graph.inserting_before(node):
                    laid_out[key] = _contiguous(graph, read, layout)
            node.update_arg(position, laid_out[key])


def _results(traced: Traced) -> list[fx.Node]:
    """What is computed and given out, and may have a layout."""
    everything = [*traced.outputs, *traced.gradients.values()]
    nodes = [n for n in dict.fromkeys(everything) if isinstance(n, fx.Node) and n.op == "call_function"]
    return [n for n in nodes if not is_number(n) and n.meta["val"].dim() > 2]


def _format(node: fx.Node) -> torch.memory_format | None:
    """The layout that ``node`` was traced with, if it is the usual one or that of images."""
    fake = node.meta["val"]
    formats = [torch.contiguous_format, *([_FORMATS[fake.dim()]] if fake.dim() in _FORMATS else [])]
    # of sizes that change, those of the trace: to ask for the tensor's own would be an assumption about all
    like = torch.empty_strided(
        [hint(n) for n in fake.shape], [hint(n) for n in fake.stride()], device="meta", dtype=fake.dtype
    )
    return next((f for f in formats if like.is_contiguous(memory_format=f)), None)


def _as_in_eager(traced: Traced) -> dict[fx.Node, fx.Node]:
    """Per result the same in the layout that it was traced with."""
    formed = {}
    for node in _results(traced):
        layout = _format(node)
        assert layout is not None, "this is not for the graph"
        shape, strides = node.meta["val"].shape, node.meta["val"].stride()
        with traced.graph.inserting_before(traced.graph.output_node()):
            formed[node] = result = _contiguous(traced.graph, node, layout)
            if 1 in shape and all(isinstance(n, int) for n in [*shape, *strides]):
                # contiguous whatever its stride there is, by which others compare layouts all the same
                formed[node] = traced.graph.call_function(aten.as_strided.default, (result, shape, strides))
                formed[node].meta["val"] = node.meta["val"]
    return formed


def _contiguous(graph: fx.Graph, node: fx.Node, memory_format: torch.memory_format) -> fx.Node:
    result = graph.call_function(torch.Tensor.contiguous, (node,), {"memory_format": memory_format})
    result.meta["val"] = node.meta["val"]
    return result
