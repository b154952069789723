"""Matrix products."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder, dtype_of, rank_of, shape_of
from lightning_ort.compiler.lowering.registry import lowers
from lightning_ort.compiler.lowering.shapes import unpermuted

aten = torch.ops.aten

GEMM_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _matrix(g: GraphBuilder, arg: fx.Node) -> tuple[ir.Value, int]:
    """The operand of a Gemm and its ``trans`` flag; transpositions are looked through."""
    source, order = unpermuted(g, arg)
    return g.value(source), int(order == [1, 0])


def _inner_is_empty(a: fx.Node) -> bool:
    """ONNX Runtime 1.19 leaves such a product uninitialised."""
    inner = shape_of(a)[-1]
    return isinstance(inner, int) and inner == 0


def _product(g: GraphBuilder, a: fx.Node, b: fx.Node) -> ir.Value:
    """``a @ b`` for matrices or batches of them, in a type that ONNX Runtime multiplies."""
    dtype = dtype_of(a)
    if _inner_is_empty(a):
        shape = g.op("Concat", g.op("Shape", g.value(a), end=-1), g.op("Shape", g.value(b), start=-1), axis=0)
        return g.op("Expand", g.constant(0, dtype), shape)
    if rank_of(a) == 2 and rank_of(b) == 2 and dtype in GEMM_TYPES:
        (x, trans_a), (y, trans_b) = _matrix(g, a), _matrix(g, b)
        if trans_a or trans_b:
            return g.op("Gemm", x, y, transA=trans_a, transB=trans_b)
        return g.op("MatMul", x, y)
    wide = torch.int32 if dtype in (torch.int8, torch.int16, torch.uint8) else dtype
    return g.cast(g.op("MatMul", g.operand(a, wide), g.operand(b, wide)), wide, dtype)


@lowers(aten.mm.default, aten.bmm.default)
def mm(g: GraphBuilder, node: fx.Node, a: fx.Node, b: fx.Node) -> ir.Value:
    return _product(g, a, b)


def _are_attributes(*factors: Any) -> bool:
    """Whether the factors of a Gemm can be written as attributes, which are float32 numbers."""
    return all(isinstance(f, (int, float)) and float(np.float32(f)) == f for f in factors)


@lowers(aten.addmm.default)
def addmm(
    g: GraphBuilder, node: fx.Node, c: fx.Node, a: fx.Node, b: fx.Node, *, beta: Any = 1, alpha: Any = 1
) -> ir.Value:
    if dtype_of(node) not in GEMM_TYPES or _inner_is_empty(a) or beta == 0 or not _are_attributes(alpha, beta):
        return baddbmm(g, node, c, a, b, beta=beta, alpha=alpha)
    (x, trans_a), (y, trans_b) = _matrix(g, a), _matrix(g, b)
    return g.op("Gemm", x, y, g.value(c), alpha=float(alpha), beta=float(beta), transA=trans_a, transB=trans_b)


@lowers(aten.baddbmm.default)
def baddbmm(
    g: GraphBuilder, node: fx.Node, c: fx.Node, a: fx.Node, b: fx.Node, *, beta: Any = 1, alpha: Any = 1
) -> ir.Value:
    dtype = dtype_of(node)
    product = _product(g, a, b)
    if alpha != 1:
        product = g.op("Mul", product, g.operand(alpha, dtype))
    if beta == 0:  # torch then does not read c, which may be NaN
        return product
    addend = g.value(c)
    if beta != 1:
        addend = g.op("Mul", addend, g.operand(beta, dtype))
    return g.op("Add", product, addend)


@lowers(aten.mv.default, aten.dot.default, aten.vdot.default, aten.matmul.default)
def matmul(g: GraphBuilder, node: fx.Node, a: fx.Node, b: fx.Node) -> ir.Value:
    dtype = dtype_of(node)
    if _inner_is_empty(a):
        return g.op("Expand", g.constant(0, dtype), g.ints([int(d) for d in shape_of(node)]))
    wide = torch.int32 if dtype in (torch.int8, torch.int16, torch.uint8) else dtype
    return g.cast(g.op("MatMul", g.operand(a, wide), g.operand(b, wide)), wide, dtype)
