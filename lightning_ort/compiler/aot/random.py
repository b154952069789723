"""Random draws as ONNX operators, for graphs that run where there is no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import sympy
import torch
from torch import fx

from lightning_ort.compiler.lowering import GraphBuilder
from lightning_ort.errors import UnsupportedError
from lightning_ort.runtime.tensors import ONNX

__all__ = ["write_draw"]

aten = torch.ops.aten


def write_draw(g: GraphBuilder, node: fx.Node, inputs: Sequence[fx.Node]) -> None:
    """Give the placeholder ``node`` of a random draw a value that ONNX Runtime draws at each run.

    Raises:
        UnsupportedError: a distribution that ONNX has no operator for, or a size that no input shows.
    """
    target, layout, args, _ = node.meta["draw"]
    shape = _shape(g, node.meta["val"].shape, inputs)
    zeros = g.op("ConstantOfShape", shape, value=ir.tensor([0.0], dtype=ir.DataType.FLOAT))
    to = int(ONNX[layout.dtype])
    if target == aten.bernoulli.p:
        uniform = g.op("RandomUniformLike", zeros, low=0.0, high=1.0)
        drawn = g.op("Less", uniform, g.constant(float(args[1]), torch.float32))
    elif target in (aten.rand.default, aten.rand_like.default):
        drawn = g.op("RandomUniformLike", zeros, low=0.0, high=1.0)
    elif target in (aten.randn.default, aten.randn_like.default):
        drawn = g.op("RandomNormalLike", zeros, mean=0.0, scale=1.0)
    elif target == aten.uniform.default:
        low, high = _bounds(args)
        drawn = g.op("RandomUniformLike", zeros, low=low, high=high)
    elif target == aten.normal_functional.default:
        mean, scale = _bounds(args)
        drawn = g.op("RandomNormalLike", zeros, mean=mean, scale=scale)
    else:
        raise UnsupportedError(f"The random operator {target} has no ONNX form.")
    drawn = g.op("Cast", drawn, to=to)
    divisor = node.meta["divisor"]
    g.define(node, drawn if divisor is None else g.op("Div", drawn, g.constant(divisor, layout.dtype)))


def _bounds(args: Sequence[Any]) -> tuple[float, float]:
    """The two parameters of a distribution after its tensor; 0 and 1 where they are left out."""
    given = [float(a) for a in args[1:]]
    return (given[0] if given else 0.0), (given[1] if len(given) > 1 else 1.0)


def _shape(g: GraphBuilder, shape: Sequence[Any], inputs: Sequence[fx.Node]) -> ir.Value:
    known: dict[sympy.Symbol, ir.Value] = {}
    for node in inputs:
        for d, size in enumerate(node.meta["val"].shape):
            expression = _expression(size)
            if isinstance(expression, sympy.Symbol) and expression not in known:
                known[expression] = g.op("Shape", g.value(node), start=d, end=d + 1)
    return g.dims([s if isinstance(s, int) else _size(g, _expression(s), known) for s in shape])


def _expression(size: Any) -> Any:
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def _size(g: GraphBuilder, expression: sympy.Expr, known: dict[sympy.Symbol, ir.Value]) -> ir.Value:
    """A polynomial of sizes, with whole quotients, as an int64 vector of length 1."""
    if expression.is_Integer:
        return g.ints([int(expression)])
    if expression in known:
        return known[expression]
    parts = [_size(g, a, known) for a in expression.args]
    name = type(expression).__name__
    op_type = {"Add": "Add", "Mul": "Mul", "FloorDiv": "Div", "CleanDiv": "Div", "Mod": "Mod", "Pow": "Pow"}.get(name)
    if op_type is None or not parts:
        raise UnsupportedError(f"A random tensor has the size {expression}, which the inputs do not show.")
    total = parts[0]
    for part in parts[1:]:
        total = g.op(op_type, total, part)
    return total
