"""Running sums and products."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, rank_of
from lightning_ort.compiler.lowering.registry import lowers

aten = torch.ops.aten


@lowers(aten.cumsum.default)
def cumsum(g: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, *, dtype: Any = None) -> ir.Value:
    kind = dtype_of(node)
    wide = kind if kind.is_floating_point or kind == torch.int32 else torch.int64
    value = g.operand(x, wide)
    if rank_of(x):
        value = g.op("CumSum", value, g.constant(dim % rank_of(x), torch.int64))
    return g.cast(value, wide, kind)
