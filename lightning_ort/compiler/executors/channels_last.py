"""Graphs run by torch with images whose channels lie next to each other, as oneDNN's convolutions like to have them."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from lightning_ort.compiler.executors.executable import Results
from lightning_ort.compiler.executors.torch import TorchExecutable
from lightning_ort.compiler.placement import is_foreign
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

    What reads memory by address would read other entries, and so may operators that are not torch's own: those of users
    get what eager gives them. A result that is not contiguous would lie otherwise.
    """
    nodes = traced.graph.nodes
    formats = {layout[1] for n in nodes if (layout := _layout(n))}
    if formats <= {torch.contiguous_format} or any(n.target in _BY_ADDRESS or is_foreign(n) for n in nodes):
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
        _Layout(traced.graph)
        super()._compile(traced, results.replaced(_as_in_eager(traced)))


_CONVOLUTIONS = {aten.convolution.default: (0, 1), aten.convolution_backward.default: (0, 1, 2)}
"""To the positions of their images, and of their weight at the end."""

_NORMALIZATIONS = {
    aten._native_batch_norm_legit_functional.default: (0,), aten.native_batch_norm_backward.default: (0, 1),
    aten.native_group_norm.default: (0,), aten.native_group_norm_backward.default: (0, 1),
}  # fmt: skip
"""To the positions of their images."""

_VECTOR = 16
"""Channels that torch's kernels of normalizations take at once; for what is left over they take ten times as long."""


def _layout(node: fx.Node) -> tuple[Sequence[int], torch.memory_format] | None:
    """Positions of arguments of ``node`` that should lie in a certain way, and that way.

    Convolutions with about as many weights as images keep the usual one: weights are brought into the other one, and
    their gradients out of it, in each run.
    """
    positions = _CONVOLUTIONS.get(node.target) or _NORMALIZATIONS.get(node.target)
    if positions is None:
        return None
    fakes = [node.args[i].meta["val"] for i in positions]
    if fakes[0].dim() not in _FORMATS or fakes[0].dtype.itemsize > 4:
        return None
    if node.target in _NORMALIZATIONS:
        usual = hint(fakes[0].shape[1]) % _VECTOR != 0
        if node.target is aten.native_group_norm_backward.default:
            *_, (of_image, *_) = node.args
            usual |= not of_image  # torch's kernel writes that gradient all the same, to nowhere
        return (positions, torch.contiguous_format) if usual else None
    *images, weight = fakes
    if len(images) == 1:
        images.append(node.meta["val"])
    last = _entries(images) > 2 * _entries([weight])
    return positions, _FORMATS[weight.dim()] if last else torch.contiguous_format


def _entries(fakes: Iterable[torch.Tensor]) -> int:
    return sum(math.prod(map(hint, fake.shape)) for fake in fakes)


_PASSING = {
    aten._adaptive_avg_pool2d.default, aten.avg_pool2d.default, aten.avg_pool2d_backward.default,
    aten.cat.default, aten.constant_pad_nd.default, aten.leaky_relu_backward.default,
    aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default,
    aten.upsample_bilinear2d.default, aten.upsample_bilinear2d_backward.default, aten.upsample_nearest2d.default,
    aten.upsample_nearest2d_backward.default,
}  # fmt: skip
"""Operators besides elementwise ones whose results lie as what they read."""


class _Layout:
    """Lays the images of ``graph`` out for those that read them; most lie that way already.

    Weights are laid out beside a convolution, or it would do so again for its gradient. Operators that read images in
    several ways are slow, so that those beside one that has its channels last have, too, and what a normalization
    gives.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._laid_out: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}
        self._last: set[fx.Node] = set()  # what is known to have its channels last
        for node in list(graph.nodes):
            self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        layout = _layout(node)
        if layout is not None:
            positions, memory_format = layout
            for position in positions:
                node.update_arg(position, self._image(node.args[position], memory_format, node))
            if memory_format is not torch.contiguous_format:
                self._last.add(node)
            elif node.target in _NORMALIZATIONS:
                self._go_on(node)
        elif node.target is operator.getitem or node.target in _NORMALIZATIONS or node.target in _PASSING:
            if any(source in self._last for source in node.all_input_nodes[:1]):
                self._last.add(node)
        elif torch.Tag.pointwise in getattr(node.target, "tags", ()):
            images = [n for n in node.all_input_nodes if _has_shape(n, node)]
            if any(n in self._last for n in images):
                memory_format = _FORMATS[node.meta["val"].dim()]
                for n in images:
                    if n not in self._last:
                        node.replace_input_with(n, self._image(n, memory_format, node))
                self._last.add(node)

    def _image(self, image: fx.Node, memory_format: torch.memory_format, before: fx.Node) -> fx.Node:
        """``image`` in that layout."""
        key = image, memory_format
        if key not in self._laid_out:
            with self._graph.inserting_before(before):
                self._laid_out[key] = _contiguous(self._graph, image, memory_format)
            if memory_format is not torch.contiguous_format:
                self._last.add(self._laid_out[key])
        return self._laid_out[key]

    def _go_on(self, normalization: fx.Node) -> None:
        """What a normalization in the usual layout gives is laid out as the others."""
        for image in [user for user in normalization.users if user.args[1] == 0]:
            with self._graph.inserting_after(image):
                result = _contiguous(self._graph, image, _FORMATS[image.meta["val"].dim()])
            image.replace_all_uses_with(result, lambda user, result=result: user is not result)
            self._last.add(result)


def _has_shape(node: fx.Node, result: fx.Node) -> bool:
    """Whether ``node`` is an image with as many entries as ``result``."""
    a, b = node.meta.get("val"), result.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or b.dim() not in _FORMATS:
        return False
    # by name: a comparison of symbolic sizes would be an assumption
    return list(map(str, a.shape)) == list(map(str, b.shape))


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
            if all(isinstance(n, int) for n in [*shape, *strides]) and 1 in shape:
                # contiguous whatever its stride there is, by which others compare layouts all the same
                formed[node] = traced.graph.call_function(aten.as_strided.default, (result, shape, strides))
                formed[node].meta["val"] = node.meta["val"]
    return formed


def _contiguous(graph: fx.Graph, node: fx.Node, memory_format: torch.memory_format) -> fx.Node:
    """The value of ``node`` in that layout: itself, if it lies like that already."""
    # with one channel it lies both ways, and only a copy has the strides by which kernels know the one from the other
    is_grey = memory_format is not torch.contiguous_format and hint(node.meta["val"].shape[1]) == 1
    target = aten.clone.default if is_grey else torch.Tensor.contiguous
    result = graph.call_function(target, (node,), {"memory_format": memory_format})
    result.meta["val"] = node.meta["val"]
    return result
