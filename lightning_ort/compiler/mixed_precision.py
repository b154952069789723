"""16-bit arithmetic done in float32 and rounded where torch rounds, for want of 16-bit kernels."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._ops import OpOverload

from lightning_ort.compiler.lowering import LOWERINGS
from lightning_ort.compiler.lowering.elementwise import common_dtype
from lightning_ort.compiler.symbolic_shapes import is_number
from lightning_ort.compiler.trace import Traced

__all__ = ["CONVOLUTIONS", "PRODUCTS", "Widening", "half_types"]

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)

# They read the bits of a number, not its value.
_BITS = {aten.view.dtype, aten.nextafter.default}
# Results are entries of the arguments, or their opposites: nothing to be rounded.
_EXACT = {
    getattr(packet, overload)
    for packet in (
        aten.abs, aten.alias, aten.amax, aten.amin, aten.as_strided, aten.cat, aten.clone, aten.detach, aten.diagonal,
        aten.embedding, aten.expand, aten.flip, aten.gather, aten.index, aten.index_select, aten.maximum,
        aten.max_pool2d_with_indices, aten.max_pool3d_with_indices, aten.minimum, aten.neg, aten.permute, aten.relu,
        aten.repeat, aten.reshape, aten.select, aten.slice, aten.sort, aten.split, aten.split_with_sizes, aten.squeeze,
        aten.stack, aten.t, aten.topk, aten.transpose, aten.unfold, aten.unsqueeze, aten.view, aten._unsafe_view,
        aten.zeros_like, aten.ones_like,
    )
    for overload in packet.overloads()
}  # fmt: skip

# Kernels for CPUs that take a number, or a tensor of no dimensions and another type, for one of 16 bits.
_CONVERTING = {
    aten.add, aten.sub, aten.rsub, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.fmod, aten.remainder,
    aten.floor_divide, aten.pow,
}  # fmt: skip
# Those that do so with the first operand alone.
_CONVERTING_FIRST = {aten.mul, aten.div}

_CONVERTING_NAMES = {*map(str, _CONVERTING), str(aten.hardshrink)}
_CONVERTING_FIRST_NAMES = set(map(str, _CONVERTING_FIRST))

PRODUCTS = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default})
"""What GPUs have units of their own for in 16 bits, which sum in float32 and round once, as torch does there."""
CONVOLUTIONS = frozenset({aten.convolution.default, aten.convolution_backward.default})
# Entries change their places only, for which any provider has kernels of every type.
_MOVED = {
    getattr(packet, overload)
    for packet in (
        aten.expand, aten.permute, aten.reshape, aten.squeeze, aten.t, aten.transpose, aten.unsqueeze, aten.view,
        aten._unsafe_view,
    )
    for overload in packet.overloads()
} - {aten.view.dtype}  # fmt: skip


def half_types(graph: fx.Graph) -> set[torch.dtype]:
    """The 16-bit floating-point types that occur in ``graph``."""
    return {n.meta["val"].dtype for n in graph.nodes if _is_half(n.meta.get("val"))}


class Widening:
    """Rewrites ``traced`` so that all of its 16-bit operators compute in float32.

    torch's own 16-bit kernels compute in float32 and round each result; so do these. A 16-bit tensor that enters or
    leaves the graph stays one.

    Args:
        traced: the graph, changed in place.
        rounded: round each result; where the execution provider computes in 16 bits by itself, that is not wanted.
        kept: operators for which the execution provider has 16-bit kernels; they stay as they are.

    Attributes:
        count: how many operators were rewritten.
    """

    def __init__(self, traced: Traced, *, rounded: bool = True, kept: frozenset[Any] = frozenset()) -> None:
        self.count, self._rounded = 0, rounded
        self._kept = kept | _MOVED if kept else kept
        self._graph = traced.graph
        self._half = {n: n.meta["val"].dtype for n in self._graph.nodes if _is_half(n.meta.get("val"))}
        self._narrow: dict[fx.Node, fx.Node] = {}
        self._wide: dict[fx.Node, fx.Node] = {}
        self._replaced: dict[fx.Node, fx.Node] = {}
        self._converted: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self._last_input = [n for n in self._graph.nodes if n.op == "placeholder"][-1:]
        # before any is rewritten: it gives float32 by then, and those that read it would be left out
        nodes = [n for n in self._graph.nodes if n.op == "call_function" and _has_half([n, *n.all_input_nodes])]
        met = [n for n in nodes if _is_one_of(n, _CONVERTING, _CONVERTING_NAMES)]
        self._common_types = {n: common_dtype(*n.args[:2]) for n in met}
        for node in nodes:
            self._rewrite(node)
        if not self._half:
            return
        traced.outputs = [self.result(o) for o in traced.outputs]
        traced.gradients = {i: self.result(g) for i, g in traced.gradients.items()}
        traced.updates = {i: self.result(u) for i, u in traced.updates.items()}
        output = self._graph.output_node()
        output.args = (fx.node.map_arg(output.args[0], self.result),)

    def result(self, value: Any) -> Any:
        """What stands for ``value``, a node of the graph as it was (or no node), in the graph as it is."""
        if not isinstance(value, fx.Node):
            return value
        return self._narrow_of(value) if value in self._half else self._replaced.get(value, value)

    def _rewrite(self, node: fx.Node) -> None:
        if node.target in _BITS or _is_torchs(node) or self._is_kept(node):
            self._map(node, self._narrow_of)
            self._narrow[node] = node
            return
        if self._rounded:
            self._round_operands(node)
        self._map(node, self._wide_of)
        if node.target is aten._to_copy.default:
            (source,) = node.args
            if node in self._half and not self._rounded and source.meta["val"].dtype == torch.float32:
                self._wide[node] = source
            elif node in self._half:
                self._narrow[node] = node
            elif node.meta["val"].dtype == source.meta["val"].dtype == torch.float32:
                self._replaced[node] = source
            return
        self.count += node.target is not operator.getitem
        exact = not self._rounded or (node.args[0] if node.target is operator.getitem else node).target in _EXACT
        node.args, node.kwargs = pytree.tree_map(_wide_type, (node.args, dict(node.kwargs)))
        node.meta["val"] = pytree.tree_map(_wide_fake, node.meta["val"])
        if node in self._half and exact:
            self._wide[node] = node

    def _round_operands(self, node: fx.Node) -> None:
        """Round the other operands as torch does where it computes in 16 bits: ``x == 0.1`` is not true of any else."""
        dtype = self._common_types.get(node)
        if dtype in _HALF:

            def rounded(operand: Any) -> Any:
                if isinstance(operand, (int, float)) and not isinstance(operand, bool):
                    return torch.tensor(operand, dtype=torch.float64).to(dtype).item()
                if not isinstance(operand, fx.Node) or operand in self._half or is_number(operand):
                    return operand
                return self._rounded_to(operand, dtype)

            node.args = (*map(rounded, node.args[:2]), *node.args[2:])
            node.kwargs = {name: rounded(value) if name == "alpha" else value for name, value in node.kwargs.items()}
        elif node in self._half and _is_pointwise(node.target):  # whole numbers of any size are made 16 bits first
            first = _is_one_of(node, _CONVERTING_FIRST, _CONVERTING_FIRST_NAMES)
            for operand in node.all_input_nodes:
                val = operand.meta.get("val")
                if _is_integral(val) or (first and operand is node.args[0] and _is_single(val)):
                    node.replace_input_with(operand, self._rounded_to(operand, self._half[node]))

    def _rounded_to(self, operand: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``operand``, of another type, as torch converts it to 16 bits, as float32."""
        key = operand, dtype
        if key not in self._converted:
            source = self._replaced.get(operand, operand)
            narrow = self._cast(source, dtype, self._behind(source))
            self._converted[key] = self._cast(narrow, torch.float32, narrow)
        return self._converted[key]

    def _is_kept(self, node: fx.Node) -> bool:
        if node.target is operator.getitem:
            return node.args[0] in self._narrow
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        # what was rewritten before gives float32 by now
        return node.target in self._kept and _one_type([self._half.get(n) for n in tensors])

    def _map(self, node: fx.Node, form: Any) -> None:
        def mapped(source: fx.Node) -> fx.Node:
            return form(source) if source in self._half else self._replaced.get(source, source)

        node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), mapped)

    def _narrow_of(self, node: fx.Node) -> fx.Node:
        """The 16-bit tensor."""
        if node not in self._narrow:
            given = node.op in ("placeholder", "get_attr")
            wide = self._wide.get(node, node)
            self._narrow[node] = node if given else self._cast(wide, self._half[node], self._behind(wide))
        return self._narrow[node]

    def _wide_of(self, node: fx.Node) -> fx.Node:
        """Its values as float32."""
        if node not in self._wide:
            narrow = self._narrow_of(node)
            self._wide[node] = self._cast(narrow, torch.float32, self._behind(narrow))
        return self._wide[node]

    def _behind(self, node: fx.Node) -> fx.Node:
        """Where a cast of ``node`` may stand."""
        return self._last_input[0] if node.op == "placeholder" else node

    def _cast(self, node: fx.Node, dtype: torch.dtype, after: fx.Node) -> fx.Node:
        with self._graph.inserting_after(after):
            cast = self._graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
        cast.meta = dict(node.meta)
        with torch.no_grad():
            cast.meta["val"] = node.meta["val"].to(dtype)
        return cast


def _is_one_of(node: fx.Node, packets: set[Any], names: set[str]) -> bool:
    """Whether ``node`` is a call of ``packets``, of its own or within what an operator of ``names`` is written as."""
    if getattr(node.target, "overloadpacket", None) not in packets:
        return False
    original = node.meta.get("original_aten", node.target)
    return str(getattr(original, "overloadpacket", original)) in names  # it is a copy, equal to no other


def _is_torchs(node: fx.Node) -> bool:
    """Whether torch will run ``node`` in any case, with a 16-bit kernel of its own."""
    return isinstance(node.target, OpOverload) and node.target not in LOWERINGS


def _is_pointwise(target: Any) -> bool:
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags


def _is_integral(val: Any) -> bool:
    """Whether it is a tensor of whole numbers that 16 bits may not hold; one of no dimensions is taken as a float."""
    return (
        isinstance(val, torch.Tensor)
        and val.dim() > 0
        and not (val.is_floating_point() or val.is_complex())
        and val.dtype not in (torch.bool, torch.uint8, torch.int8)
    )


def _is_single(val: Any) -> bool:
    """Whether it is a tensor of no dimensions and of more bits."""
    return isinstance(val, torch.Tensor) and val.dim() == 0 and val.dtype not in (*_HALF, torch.bool)


def _has_half(nodes: Iterable[fx.Node]) -> bool:
    """Whether one of ``nodes`` stands for a 16-bit floating-point tensor, or several results with one among them."""
    return any(_is_half(v) for n in nodes for v in pytree.tree_leaves(n.meta.get("val")))


def _one_type(dtypes: list[torch.dtype | None]) -> bool:
    return len(set(dtypes)) == 1 and dtypes[0] is not None


def _is_half(val: Any) -> bool:
    return isinstance(val, torch.Tensor) and val.dtype in _HALF


def _wide_type(argument: Any) -> Any:
    return torch.float32 if isinstance(argument, torch.dtype) and argument in _HALF else argument


def _wide_fake(val: Any) -> Any:
    if not _is_half(val):
        return val
    with torch.no_grad():
        # zeros that nobody has written, such as the gradients of a sign, cannot be converted
        return torch.empty_like(val, dtype=torch.float32) if val._is_zerotensor() else val.to(torch.float32)
