"""Attention, and the rotation of its positions."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ort.errors import UnsupportedError
from lightning_ort.onnx_reader.registry import operator
from lightning_ort.runtime.tensors import TORCH

__all__: list[str] = []

_RAW, _CAPPED, _BIASED, _WEIGHTS = range(4)
"""What the fourth output of ``Attention`` is: products, these after the cap, with the masks, after the softmax."""


@operator("Attention", constants=["nonpad_kv_seqlen"])
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = _RAW,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    opset: int,
    n_outputs: int,
    label: str,
) -> Any:
    """Of (batch, heads, length, head size), or (batch, length, heads · head size) with the numbers of heads.

    Queries that may see no key get zeros. Keys and values of fewer heads are those of several heads of queries.
    """
    flat = q.dim() == 3
    if flat:
        q = _heads(q, q_num_heads, label, "q_num_heads")
        k, v = (_heads(x, kv_num_heads, label, "kv_num_heads") for x in (k, v))
    before = 0
    if (past_key is None) != (past_value is None):
        raise UnsupportedError(f"{label}: it has one of past_key and past_value; expected both or none")
    if past_key is not None and past_value is not None:
        before = past_key.shape[2]
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    present = k, v
    shared = q.shape[1] // k.shape[1]
    if shared > 1:
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    root = math.sqrt(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    scores = [(q * root) @ (k * root).transpose(-1, -2)]
    scores.append(softcap * torch.tanh(scores[_RAW] / softcap) if softcap else scores[_RAW])
    bias, empty = _bias(scores[_RAW], attn_mask, before, nonpad_kv_seqlen, bool(is_causal), pads=opset >= 24)
    scores.append(scores[_CAPPED] if bias is None else scores[_CAPPED] + bias)
    weights = scores[_BIASED] if softmax_precision is None else scores[_BIASED].to(TORCH[softmax_precision])
    if empty:
        unseen = (weights == -math.inf).all(-1, keepdim=True)
        weights = weights.masked_fill(unseen, 0.0).softmax(-1).masked_fill(unseen, 0.0)
    else:
        weights = weights.softmax(-1)
    scores.append(weights.to(q.dtype))
    y = scores[_WEIGHTS] @ v
    if flat:
        y = y.transpose(1, 2).flatten(2)
    return y if n_outputs == 1 else (y, *present, scores[qk_matmul_output_mode])[:n_outputs]


def _heads(x: Tensor, heads: int | None, label: str, attribute: str) -> Tensor:
    if not heads:
        raise UnsupportedError(f"{label}: an input of three dimensions needs the attribute {attribute}")
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _bias(
    scores: Tensor, mask: Tensor | None, before: int, lengths: Tensor | None, is_causal: bool, pads: bool
) -> tuple[Tensor | None, bool]:
    """What is added to ``scores`` (batch, heads, queries, keys), and whether a query may see no key.

    Args:
        before: keys that come before those of the queries.
        lengths: keys of each sequence of the batch, of which the last are those of its queries.
        pads: whether a mask may be of fewer keys, and hides the others.
    """
    queries, keys = scores.shape[-2:]
    allowed: list[Tensor] = []
    bias = None
    if mask is not None:
        if pads and mask.shape[-1] < keys:
            hidden = False if mask.dtype == torch.bool else -math.inf
            mask = F.pad(mask, (0, keys - mask.shape[-1]), value=hidden)
        if mask.dtype == torch.bool:
            allowed.append(mask)
        else:
            bias = mask
    columns = torch.arange(keys, device=scores.device)
    if lengths is not None:
        lengths = lengths.reshape(-1, 1, 1, 1)
        allowed.append(columns < lengths)
    if is_causal:
        offset = before if lengths is None else lengths - queries
        allowed.append(columns <= torch.arange(queries, device=scores.device)[:, None] + offset)
    for seen in allowed:
        hides = torch.where(seen, 0.0, -math.inf).to(scores.dtype)
        bias = hides if bias is None else bias + hides
    return bias, mask is not None or lengths is not None


@operator("RotaryEmbedding", constants=["cos_cache", "sin_cache", "position_ids"])
def rotary_embedding(
    x: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
    label: str,
) -> Tensor:
    """Of (batch, heads, length, head size), or (batch, length, heads · head size) with ``num_heads``."""
    flat = x.dim() == 3
    rows = _heads(x, num_heads, label, "num_heads") if flat else x
    size = rotary_embedding_dim or rows.shape[-1]
    turned, rest = rows[..., :size], rows[..., size:]
    cosine, sine = ((t if position_ids is None else t[position_ids]).unsqueeze(1) for t in (cos_cache, sin_cache))
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = [cosine * first - sine * second, sine * first + cosine * second]
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    y = torch.cat([turned, rest], -1)
    return y.transpose(1, 2).flatten(2) if flat else y
