"""Scaled dot-product attention written out, with the dropout draw of eager."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda

from lightning_ort.compiler.decompositions.registry import IS_TORCH_2_14, composes

aten = torch.ops.aten

_FUSED = {3, 4} if IS_TORCH_2_14 else {4}
"""Dimensions of queries for which torch's CPU kernel does not write attention out."""


@composes(aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """softmax(query @ key.T * scale + mask) @ value; rows that are masked altogether give zeros."""
    if attn_mask is not None and is_causal:
        return NotImplemented  # an error, which torch words
    given = query.dtype
    on_cpu = query.device.type == "cpu"
    drawn_wide = dropout_p > 0 and not on_cpu and not cuda.fp16_bf16_reduction_math_sdp_allowed()
    if given.itemsize < 4 and (on_cpu or drawn_wide):
        # so do torch's own kernels for CPUs, and those that are written out, whose dropout is drawn for float32 then
        query, key, value = query.float(), key.float(), value.float()
        attn_mask = attn_mask.float() if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    if enable_gqa:
        key, value = _repeated(key, query), _repeated(value, query)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    blank = None
    if is_causal:
        rows, columns = query.shape[-2], key.shape[-2]
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=query.device).triu(1)
        if query.dim() not in _FUSED or dropout_p > 0:
            # what torch writes out itself adds the mask: scores that are NaN or infinite make their row NaN
            scores = scores + torch.zeros_like(hidden, dtype=scores.dtype).masked_fill(hidden, -torch.inf)
        else:
            scores = scores.masked_fill(hidden, -torch.inf)
    elif attn_mask is not None:
        scores, blank = _masked(scores, attn_mask)
    weights = scores.softmax(-1)
    if dropout_p > 0:
        weights = F.dropout(weights, dropout_p)
    result = (weights @ value).to(given)
    return result if blank is None else result.masked_fill(blank, 0)


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    """Heads of keys or values, each for as many heads of queries as share it."""
    heads, wanted = x.shape[-3], query.shape[-3]
    if heads == wanted:
        return x
    shape = [*x.shape[:-3], heads, wanted // heads, *x.shape[-2:]]
    return x.unsqueeze(-3).expand(shape).reshape(*x.shape[:-3], wanted, *x.shape[-2:])


def _masked(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Masked scores, and which rows are masked altogether: those stay as they are, for a softmax without NaN."""
    if mask.dtype == torch.bool:
        hidden = ~mask
        blank = hidden.all(-1, keepdim=True)
        # added, as torch's kernels do: a score that is NaN stays so
        return scores + torch.zeros_like(hidden, dtype=scores.dtype).masked_fill(hidden & ~blank, -torch.inf), blank
    blank = (mask.detach() == -torch.inf).all(-1, keepdim=True)
    return scores + mask.masked_fill(blank, 0), blank
