"""Sums and means in the forms in which ONNX Runtime on the CPU is fast, and exact enough.

Its kernels add up one number after the other, in a few lanes. The sum of two million equal numbers is off by a
thousandth; in two stages of 1400 each it is off by a millionth, in the same time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lightning_ort.compiler.lowering.builder import GraphBuilder
from lightning_ort.compiler.lowering.factories import STORED

__all__ = ["averaged", "summed"]

_LONGEST = 4096
"""most numbers of float32 that are added up in one stage"""


def summed(
    g: GraphBuilder,
    value: ir.Value,
    sizes: Sequence[Any],
    axes: Sequence[int],
    dtype: torch.dtype,
    keepdim: bool = False,
) -> ir.Value:
    """The sum of ``value`` over ``axes``; none means none.

    Over the first dimensions it is the product of a row of ones with a matrix, which is up to eight times faster than
    ONNX Runtime's kernel for such sums.

    Args:
        g: the graph.
        value: what is summed.
        sizes: of ``value``; those that vary are ``torch.SymInt``.
        axes: dimensions from the front, in ascending order.
        dtype: of ``value``.
        keepdim: leave a dimension of size 1 for each.
    """
    if not axes:
        return value
    lead, rest = sizes[: len(axes)], sizes[len(axes) :]
    if not (
        dtype in (torch.float32, torch.float64)
        and rest
        and list(axes) == list(range(len(axes)))
        and all(isinstance(size, int) and size > 0 for size in rest)
        # a product over nothing is none for all versions of ONNX Runtime
        and all(statically_known_true(size > 0) for size in lead)
    ):
        return _in_stages(g, "ReduceSum", value, sizes, axes, dtype, keepdim)
    width = math.prod(rest)
    matrix = value if len(sizes) == 2 else g.op("Reshape", value, g.ints([-1, width]))
    height = math.prod(lead) if all(isinstance(size, int) for size in lead) else None
    stage = 1 if height is None or dtype == torch.float64 else _stage(height)
    if stage > 1:
        assert height is not None
        blocks = g.op("Reshape", matrix, g.ints([height // stage, stage, width]))
        matrix, height = g.op("MatMul", _ones(g, stage, dtype), blocks), height // stage
    if height is None:
        key = ("ones", str(math.prod(lead)), dtype)
        ones = g.shared(key, lambda: g.op("Expand", g.constant(1, dtype), g.op("Shape", matrix, start=0, end=1)))
    else:
        ones = _ones(g, height, dtype)
    total = g.op("MatMul", ones, matrix)
    shape = [1] * len(axes) * keepdim + list(rest)
    return total if shape == [width] else g.op("Reshape", total, g.ints(shape))


def _ones(g: GraphBuilder, length: int, dtype: torch.dtype) -> ir.Value:
    if length <= STORED:
        return g.constant(np.ones(length), dtype)
    return g.op("Expand", g.constant(1, dtype), g.ints([length]))


def averaged(
    g: GraphBuilder,
    value: ir.Value,
    sizes: Sequence[Any],
    axes: Sequence[int],
    dtype: torch.dtype,
    keepdim: bool = False,
) -> ir.Value:
    """The mean of ``value`` over ``axes``, none of which is empty; arguments are those of :func:`summed`."""
    counted = [sizes[axis] for axis in axes]
    if axes and axes[-1] < len(axes) < len(sizes) and all(isinstance(size, int) for size in counted):
        total = summed(g, value, sizes, axes, dtype, keepdim)
        return g.op("Div", total, g.constant(math.prod(counted), dtype))
    return _in_stages(g, "ReduceMean", value, sizes, axes, dtype, keepdim)


def _in_stages(
    g: GraphBuilder,
    op_type: str,
    value: ir.Value,
    sizes: Sequence[Any],
    axes: Sequence[int],
    dtype: torch.dtype,
    keepdim: bool,
) -> ir.Value:
    """A sum or mean; the mean of means of as many numbers each is that of all."""
    if not axes:
        return value
    counted = [sizes[axis] for axis in axes]
    count = math.prod(counted) if all(isinstance(size, int) for size in counted) else None
    *others, last = axes
    several = sum(not (isinstance(size, int) and size == 1) for size in counted) > 1
    if dtype != torch.float32 or (count is not None and count <= _LONGEST) or (count is None and not several):
        return g.op(op_type, value, g.ints(axes), keepdims=int(keepdim))
    if count is not None and len(axes) == len(sizes):
        flat = g.op("Reshape", value, g.ints([-1, _stage(count)]))
        total = g.op(op_type, g.op(op_type, flat, g.ints([1]), keepdims=0), keepdims=0)
        return g.op("Reshape", total, g.ints([1] * len(sizes))) if keepdim else total
    if others:
        inner = _in_stages(g, op_type, value, sizes, [last], dtype, keepdim)
        remaining = [*sizes[:last], *([1] if keepdim else []), *sizes[last + 1 :]]
        return _in_stages(g, op_type, inner, remaining, others, dtype, keepdim)
    if last != len(sizes) - 1:
        return g.op(op_type, value, g.ints(axes), keepdims=int(keepdim))
    assert count is not None
    stage = _stage(count)
    pieces = g.op("Reshape", value, g.ints([*[0] * last, count // stage, stage]))
    inner = g.op(op_type, pieces, g.ints([last + 1]), keepdims=0)
    return g.op(op_type, inner, g.ints([last]), keepdims=int(keepdim))


def _stage(count: int) -> int:
    """How many of ``count`` numbers are added up at first: a divisor near the root, 1 if they are few."""
    if count <= _LONGEST:
        return 1
    return next(d for d in range(math.isqrt(count), 0, -1) if count % d == 0)
