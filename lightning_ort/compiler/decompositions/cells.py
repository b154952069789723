"""Single steps of LSTM and GRU, for which torch has kernels on a GPU that have no other form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ort.compiler.decompositions.composites import composes

__all__: list[str] = []

aten = torch.ops.aten


@composes(aten.lstm_cell.default)
def lstm_cell(
    x: Tensor,
    states: Sequence[Tensor],
    weight: Tensor,
    hidden_weight: Tensor,
    bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """New hidden state and cell, as ``torch.nn.LSTMCell``; the gates are i, f, g, o."""
    hidden, cell = states
    gates = F.linear(x, weight, bias) + F.linear(hidden, hidden_weight, hidden_bias)
    i, f, g, o = gates.chunk(4, -1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


@composes(aten.gru_cell.default)
def gru_cell(
    x: Tensor,
    hidden: Tensor,
    weight: Tensor,
    hidden_weight: Tensor,
    bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Tensor:
    """New hidden state, as ``torch.nn.GRUCell``; the gates are r, z, n."""
    xr, xz, xn = F.linear(x, weight, bias).chunk(3, -1)
    hr, hz, hn = F.linear(hidden, hidden_weight, hidden_bias).chunk(3, -1)
    n = (xn + (xr + hr).sigmoid() * hn).tanh()
    return n + (xz + hz).sigmoid() * (hidden - n)
