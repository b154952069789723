"""Which values are finite as long as the computation is sound."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lightning_ort.compiler import custom_ops  # noqa: F401  they define operators

aten, own = torch.ops.aten, torch.ops.lightning_ort

# Bounded, or sums of products of their arguments: where those are finite and the computation is sound, so are these.
_BOUNDED = {
    aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.mv, aten.dot, aten.convolution, aten.convolution_backward,
    aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm, aten.native_batch_norm_backward,
    aten._native_batch_norm_legit_functional, aten.embedding, aten.sigmoid, aten.tanh, aten.erf, aten.sin, aten.cos,
    aten.native_group_norm_backward, aten._native_batch_norm_legit, aten._native_batch_norm_legit_no_training,
    aten._fused_rms_norm, aten._fused_rms_norm_backward, own.lstm_steps, own.lstm_steps_backward, own.gru_steps,
    own.gru_steps_backward, own.rnn_steps, own.rnn_steps_backward,
    aten._softmax_backward_data, aten._log_softmax_backward_data, aten.nll_loss_backward,
}  # fmt: skip

# Finite if their arguments are.
_KEEPING = {
    aten.add, aten.sub, aten.rsub, aten.mul, aten.neg, aten.abs, aten.relu, aten.gelu, aten.silu, aten.leaky_relu,
    aten._log_softmax,
    aten.threshold_backward, aten.gelu_backward, aten.leaky_relu_backward, aten.clamp, aten.clamp_min, aten.clamp_max,
    aten.maximum, aten.minimum, aten.where, aten.masked_fill, aten.sum, aten.mean, aten.amax, aten.amin, aten._to_copy,
    aten.view, aten._unsafe_view, aten.reshape, aten.permute, aten.transpose, aten.t, aten.expand, aten.unsqueeze,
    aten.squeeze, aten.slice, aten.select, aten.cat, aten.stack, aten.split, aten.split_with_sizes, aten.flip,
    aten.clone, aten.gather, aten.index, aten.full, aten.full_like, aten.zeros_like, aten.ones_like, aten.scalar_tensor,
    aten.slice_backward, aten.select_backward, aten.constant_pad_nd, aten.max_pool2d_with_indices_backward,
    aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward, own.max_pool_backward, aten.im2col,
    aten.embedding_dense_backward, aten.scatter_add, aten.reflection_pad2d, aten.replication_pad2d,
    aten.avg_pool2d_backward, aten.avg_pool2d, aten.max_pool2d_with_indices,
}  # fmt: skip

_CHOICES = (
    aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.masked_fill.Scalar, aten.masked_fill.Tensor,
)  # fmt: skip


def is_finite(arg: Any, *, products: bool = False) -> bool:
    """Whether no element of ``arg`` can be infinite or NaN unless the weights are, or something overflowed.

    Where it is, zeros may be written by multiplication. Inputs other than weights are not taken for finite, nor is what
    is computed from them: data may use NaN for what is missing, and mask it. Random draws are.

    Args:
        arg: an argument of an fx node.
        products: take sums of products for finite whatever they are of.
    """
    if isinstance(arg, (list, tuple)):
        return all(is_finite(a, products=products) for a in arg)
    if isinstance(arg, float):
        return abs(arg) < float("inf")
    if not isinstance(arg, fx.Node):
        return True
    known = arg.meta.setdefault("finite", {})
    if products not in known:
        known[products] = _computes_finite(arg, products)
    return bool(known[products])


def _computes_finite(node: fx.Node, products: bool) -> bool:
    if not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
        return True
    if isinstance(node.meta["val"], torch.Tensor) and not node.meta["val"].is_floating_point():
        return True
    if node.op != "call_function":
        return "draw" in node.meta or "weight" in node.meta
    packet = getattr(node.target, "overloadpacket", None)
    if packet is aten._softmax:
        return is_finite(_before_masks(node.args[0]), products=products)
    if packet in _BOUNDED:
        return products or all(is_finite(a) for a in node.args)
    if packet is aten.div:
        divisor = node.args[1]
        is_size = isinstance(divisor, fx.Node) and isinstance(divisor.meta["val"], torch.SymInt)
        if not is_size and not (isinstance(divisor, (int, float)) and divisor != 0):
            return False
        return is_finite(node.args[0], products=products)
    if packet in _KEEPING:
        return all(is_finite(a, products=products) for a in node.args)
    return getattr(node.target, "__name__", "") == "getitem" and is_finite(node.args[0], products=products)


def _before_masks(node: Any) -> Any:
    """The scores that ``node`` has partly replaced by -inf, which a softmax takes unless all of a row is masked."""
    while isinstance(node, fx.Node) and node.target in _CHOICES:
        tensors = [a for a in node.args if isinstance(a, fx.Node) and _has_entries(a)]
        if len(tensors) != 1:
            break
        node = tensors[0]
    return node


def _has_entries(node: fx.Node) -> bool:
    """Whether ``node`` is a floating-point tensor that is more than one number."""
    val = node.meta["val"]
    numbers = (aten.scalar_tensor.default, aten.full.default, aten.full_like.default)
    return isinstance(val, torch.Tensor) and val.is_floating_point() and val.dim() > 0 and node.target not in numbers
