"""Embedding tables and the gradients of their rows."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.bounds import positions
from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, shape_of
from lightning_ort.compiler.lowering.registry import lowers

aten = torch.ops.aten


@lowers(aten.embedding.default)
def embedding(
    g: GraphBuilder,
    node: fx.Node,
    weight: fx.Node,
    indices: fx.Node,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> ir.Value:
    return g.op("Gather", g.value(weight), positions(g, indices, shape_of(weight)[0]), axis=0)


@lowers(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    g: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    indices: fx.Node,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> ir.Value:
    dtype, width = dtype_of(grad), shape_of(grad)[-1]
    rows = g.op("Reshape", g.value(grad), g.ints([-1, int(width)]))
    flat = g.op("Reshape", positions(g, indices, num_weights), g.ints([-1, 1]))
    if padding_idx >= 0:
        kept = g.op("Not", g.op("Equal", flat, g.constant(padding_idx, torch.int64)))
        rows = g.op("Where", kept, rows, g.constant(0, dtype))
    if scale_grad_by_freq:
        ones = g.op("Expand", g.constant([[1]], dtype), g.op("Shape", flat))
        zeros = g.op("Expand", g.constant([[0]], dtype), g.dims([num_weights, 1]))
        counts = g.op("ScatterElements", zeros, flat, ones, axis=0, reduction="add")
        rows = g.op("Div", rows, g.op("Gather", counts, g.op("Reshape", flat, g.ints([-1])), axis=0))
    zeros = g.op("Expand", g.constant([[0]], dtype), g.dims([num_weights, int(width)]))
    spread = g.op("Expand", flat, g.op("Shape", rows))
    return g.op("ScatterElements", zeros, spread, rows, axis=0, reduction="add")
