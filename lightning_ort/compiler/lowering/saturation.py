"""Functions whose results lie between bounds: whether anybody could notice that one lies outside by a rounding."""

from __future__ import annotations

import enum
import operator

from torch import fx, ops

__all__ = ["Reader", "nearness_read"]

aten = ops.aten

_BLURRING = {
    aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.convolution, aten.convolution_backward, aten.sum, aten.mean,
    aten.exp, aten.tanh, aten.sigmoid, aten.erf, aten.sin, aten.cos, aten._softmax, aten._log_softmax,
    aten.native_layer_norm, aten.native_group_norm, aten.native_batch_norm, aten._native_batch_norm_legit_functional,
}  # fmt: skip
"""What reads numbers to no more digits than they have: a sum has lost the bound, and these are smooth everywhere."""

_CARRYING = {
    aten.mul, aten.add, aten.sub, aten.rsub, aten.neg, aten.abs, aten.square, aten.relu, aten.view, aten.reshape,
    aten._unsafe_view, aten.permute, aten.transpose, aten.t, aten.expand, aten.squeeze, aten.unsqueeze, aten.select,
    aten.slice, aten.cat, aten.stack, aten.split, aten.split_with_sizes, aten.clone, aten.alias, aten.flip,
}  # fmt: skip
"""What may lead to 1 - x², which is not below zero where x has kept its bounds."""

_MOST = 60


class Reader(enum.Enum):
    """Of how near a number comes to a bound."""

    NOBODY = "nobody"
    OUTSIDE = "whoever gets the results"
    FUNCTION = "a function in the graph"


def nearness_read(node: fx.Node) -> Reader:
    """Who reads how near ``node`` comes to its bounds, which rounding may exceed by a unit in the last place.

    A logarithm, a root, an arc cosine or a comparison does, also of what was computed from it.
    """
    seen, waiting, reader = {node}, [node], Reader.NOBODY
    while waiting:
        for user in waiting.pop().users:
            packet = getattr(user.target, "overloadpacket", None)
            if packet in _BLURRING or user in seen:
                continue
            if user.op == "output":
                reader = Reader.OUTSIDE
                continue
            is_power = packet is aten.pow and isinstance(user.args[1], int) and user.args[1] >= 0
            if (packet not in _CARRYING and not is_power and user.target is not operator.getitem) or len(seen) > _MOST:
                return Reader.FUNCTION
            seen.add(user)
            waiting.append(user)
    return reader
