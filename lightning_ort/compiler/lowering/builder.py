"""Writes one ONNX graph, node by node, from ATen calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.registry import LOWERINGS, NotLowered
from lightning_ort.compiler.passes.recompute import SIZES
from lightning_ort.compiler.symbolic_shapes import is_number
from lightning_ort.runtime.providers.cpu import BITS, chooses_slowly
from lightning_ort.runtime.tensors import NUMPY, ONNX

__all__ = ["Dim", "GraphBuilder", "dtype_of", "rank_of", "shape_of"]

_OPSET = 20
_OPSET_OF_BITS = 26  # the first that has BitCast
_IR_VERSION = 10  # the newest that ONNX Runtime 1.19 reads
CONTRIB = "com.microsoft"
_INDEXING = {"Gather", "GatherElements", "GatherND", "ScatterElements"}

Dim: TypeAlias = int | fx.Node
"""One size: a number, or the fx node of a symbolic size."""


def dtype_of(node: fx.Node) -> torch.dtype:
    """Element type of the tensor (or symbolic number) that ``node`` stands for."""
    val = node.meta["val"]
    if isinstance(val, torch.Tensor):
        return val.dtype
    if isinstance(val, (torch.SymInt, int)) and not isinstance(val, bool):
        return torch.int64
    return torch.bool if isinstance(val, (torch.SymBool, bool)) else torch.float64


def is_on_cpu(node: fx.Node) -> bool:
    """Whether the tensor that ``node`` stands for lies there, and no GPU computes it."""
    return bool(node.meta["val"].device.type == "cpu")


def shape_of(node: fx.Node) -> torch.Size:
    """Shape of the tensor that ``node`` stands for; entries are ``int`` or ``torch.SymInt``."""
    return node.meta["val"].shape


def rank_of(node: fx.Node) -> int:
    """Number of dimensions of the tensor that ``node`` stands for."""
    return node.meta["val"].dim()


def no_form(node: fx.Node) -> str:
    """Why a call that no lowering is registered for is not lowered."""
    return f"no ONNX form for {node.target}"


class GraphBuilder:
    """An ONNX graph under construction and the ONNX value of each fx node written so far.

    Tensors are ONNX tensors of the same shape. A symbolic size (``SymInt``) is an int64 vector of length 1, so that
    shapes are built by ``Concat``; a symbolic float or bool is a scalar.

    Args:
        one_thread: one thread alone will run the graph, on the CPU. Operators may be used that several would race in.
        by_bits: types of the numbers that :meth:`where` chooses by their bits, which the session must be able to read.
    """

    def __init__(self, *, one_thread: bool = False, by_bits: Collection[torch.dtype] = ()) -> None:
        self.one_thread, self._by_bits = one_thread, by_bits
        self.inputs: list[ir.Value] = []
        self.nodes: list[ir.Node] = []
        self.initializers: list[ir.Value] = []
        self._values: dict[fx.Node, Any] = {}
        self.compact: dict[fx.Node, ir.Value] = {}
        """Smaller values that broadcast to the value of a node; element-wise operators can do with those."""
        self._constants: dict[Any, ir.Value] = {}
        self._shared: dict[Hashable, ir.Value] = {}
        self._checks: list[ir.Value] = []
        self.accepted: dict[str, str] = {}
        """The positions that an fx node accepts, by its name, for the error of a run that has others.

        In words, or empty: where an assertion says what is required, and where the operator did not say.
        """
        self._scope = "graph"
        self._reads_bits = False

    # -- what the graph consists of ---------------------------------------------------------------------------------

    def add_input(self, node: fx.Node) -> ir.Value:
        """Declare the value of ``node`` to be fed at each run; static sizes are declared, symbolic ones left open."""
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            if val.dtype not in ONNX:
                raise NotLowered(f"{val.dtype} tensors cannot be passed to ONNX Runtime")
            shape = ir.Shape([d if isinstance(d, int) else f"{node.name}_{i}" for i, d in enumerate(val.shape)])
        else:
            shape = ir.Shape([1]) if isinstance(val, (torch.SymInt, int)) else ir.Shape([])
        value = ir.Value(name=node.name, type=ir.TensorType(ONNX[dtype_of(node)]), shape=shape)
        self.inputs.append(value)
        self._values[node] = value
        return value

    def add_initializer(self, node: fx.Node, tensor: torch.Tensor) -> None:
        """Give ``node`` the constant value ``tensor``."""
        if tensor.dtype not in NUMPY:  # numpy has no bfloat16; float32 holds its values
            value = self._initializer(tensor.detach().cpu().float().contiguous().numpy(), f"{node.name}_wide")
            self._values[node] = self.cast(value, torch.float32, tensor.dtype)
            return
        self._values[node] = self._initializer(tensor.detach().cpu().contiguous().numpy(), node.name)

    def define(self, node: fx.Node, value: ir.Value) -> None:
        """Give ``node`` a value that was written by hand."""
        self._values[node] = value

    def lower(self, node: fx.Node) -> None:
        """Write the ATen call ``node``.

        Raises:
            NotLowered: this call has no faithful ONNX form; nodes written before stay as they were.
        """
        function = LOWERINGS.get(node.target)
        if function is None:
            raise NotLowered(no_form(node))
        written, checks, self._scope = len(self.nodes), len(self._checks), node.name
        try:
            self._values[node] = function(self, node, *node.args, **node.kwargs)
        except (NotLowered, TypeError) as error:
            del self.nodes[written:], self._checks[checks:]
            self._shared = {key: value for key, value in self._shared.items() if value.producer() in self.nodes}
            if isinstance(error, TypeError) and any(is_number(n) for n in node.all_input_nodes):
                # a number that is computed from sizes where a constant is needed
                raise NotLowered(f"{node.target} with a number that changes") from error
            raise
        _note_sizes(self._values[node], node.meta.get("val"))  # an assertion has none

    def model(self, outputs: Sequence[fx.Node]) -> ir.Model:
        """The finished model; ``outputs`` become graph outputs under the names of their fx nodes."""
        results: list[ir.Value] = []
        for node in outputs:
            value = self.value(node)
            if self._checks and isinstance(node.meta["val"], torch.Tensor):
                value = self._checked(value, node)
                self._checks = []
            # A graph output needs a name of its own, also when it is an input or stands for two outputs.
            out = self.op("Identity", value)
            out.name = f"out_{node.name}_{len(results)}"
            out.type = ir.TensorType(ONNX[dtype_of(node)])
            results.append(out)
        graph = ir.Graph(
            self.inputs,
            results,
            nodes=self.nodes,
            initializers=self.initializers,
            opset_imports={"": _OPSET_OF_BITS if self._reads_bits else _OPSET, CONTRIB: 1},
            name="step",
        )
        return ir.Model(graph, ir_version=_IR_VERSION, producer_name="lightning_ort")

    # -- writing nodes ----------------------------------------------------------------------------------------------

    def op(self, op_type: str, *inputs: ir.Value | None, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """Append one ONNX node; returns its value, or a tuple of values when ``outputs > 1``.

        Its name starts with the name of the fx node being written, so that an error of ONNX Runtime can be traced
        back to the operator and to the user's line.
        """
        trimmed = list(inputs)
        while trimmed and trimmed[-1] is None:
            trimmed.pop()
        if op_type == "Transpose" and list(attributes["perm"]) == sorted(attributes["perm"]):
            # ONNX Runtime 1.19 takes any transposition of a matrix for one that swaps, where it merges it into a Gemm
            return trimmed[0]
        name = f"{self._scope}/{op_type}_{len(self.nodes)}"
        node = ir.node(op_type, trimmed, attributes, domain=domain, num_outputs=outputs, name=name)
        for i, value in enumerate(node.outputs):
            value.name = f"{name}_{i}"
        self.nodes.append(node)
        if op_type in _INDEXING:
            self.accepted.setdefault(self._scope, "")
        return node.outputs[0] if outputs == 1 else tuple(node.outputs)

    def where(self, mask: ir.Value, chosen: ir.Value, otherwise: ir.Value, dtype: torch.dtype) -> ir.Value:
        """``chosen`` where ``mask`` holds, else ``otherwise``, tensors of ``dtype`` whose entries may be anything.

        By ``Where``, or by products of their bits, read as integers, with 0 and 1: bit by bit the same, NaN and the
        signs of zeros included. Small tensors, such as sizes, are better chosen by the operator itself.
        """
        if dtype not in self._by_bits or (_is_zero(chosen) and _is_zero(otherwise)):
            return self.op("Where", mask, chosen, otherwise)
        bits = BITS[dtype]
        parts = [
            self.op("Mul", self._read_as(value, dtype, bits), self.cast(holds, torch.bool, bits))
            for holds, value in ((mask, chosen), (self.op("Not", mask), otherwise))
            if not _is_zero(value)
        ]
        return self._read_as(parts[0] if len(parts) == 1 else self.op("Add", *parts), bits, dtype)

    def chooses_slowly(self, dtype: torch.dtype) -> bool:
        """Whether :meth:`where` takes one element of ``dtype`` after the other."""
        return dtype not in self._by_bits and chooses_slowly()

    def _read_as(self, value: ir.Value, source: torch.dtype, target: torch.dtype) -> ir.Value:
        """The bits of ``value``, which is of ``source``, as numbers of ``target``, which has as many."""
        if source == target:
            return value
        self._reads_bits = True
        return self.op("BitCast", value, to=int(ONNX[target]))

    def require(self, condition: ir.Value, message: str) -> None:
        """Make a run fail unless ``condition``, a bool scalar, holds; the error of ONNX Runtime quotes ``message``.

        ONNX has no assertion. This one reads an element that is not there, and the result depends on it.
        """
        position = self.op("Where", condition, self.constant(0, torch.int64), self.constant(1, torch.int64))
        check = self.op("Gather", self.ints([0]), position, axis=0)
        check.producer().name = f"{self._scope}: {message}"
        self._checks.append(check)

    def _checked(self, value: ir.Value, node: fx.Node) -> ir.Value:
        """``value`` reshaped by computed sizes of 0, which keep the shape: not to be had unless all checks hold.

        A scalar is read from position 0, computed likewise.
        """
        zero = self._checks[0]
        for check in self._checks[1:]:
            zero = self.op("Add", zero, check)
        rank = rank_of(node)
        if rank:
            return self.op("Reshape", value, self.op("Expand", zero, self.ints([rank])))
        # ONNX Runtime 1.31 would join two Reshapes and lose the check
        return self.op("Gather", self.op("Reshape", value, self.ints([1])), zero, axis=0)

    def accept(self, positions: str) -> None:
        """Note the positions that the operator being written accepts, in words such as "0 to 9"."""
        self.accepted[self._scope] = positions

    def knows(self, node: fx.Node) -> bool:
        """Whether ``node`` has a value in this graph; another part of the step may have computed it instead."""
        return node in self._values

    def value(self, node: fx.Node, index: int | None = None) -> ir.Value:
        """ONNX value of ``node``, as it is; ``index`` picks one of several results."""
        value = self._values[node]
        if index is not None:
            value = value[index]
        if value is None:
            raise NotLowered(f"result {index} of {node.target} is not available in ONNX")
        return value

    def operand(self, arg: Any, dtype: torch.dtype) -> ir.Value:
        """``arg`` (fx node or Python number) as a tensor of ``dtype``; numbers become scalars."""
        if not isinstance(arg, fx.Node):
            return self.constant(arg, dtype)
        value = self.value(arg)
        if isinstance(arg.meta["val"], (torch.SymInt, int)) and not isinstance(arg.meta["val"], bool):
            value = self.op("Squeeze", value)
        return self.cast(value, dtype_of(arg), dtype)

    def cast(self, value: ir.Value, source: torch.dtype, target: torch.dtype) -> ir.Value:
        """``value`` converted from ``source`` to ``target``; nothing is written when they are equal."""
        if source == target:
            return value
        return self.op("Cast", value, to=int(ONNX[target]))

    def constant(self, data: Any, dtype: torch.dtype) -> ir.Value:
        """A constant from a number or (nested) list; equal constants are written once."""
        if dtype not in NUMPY:
            raise NotLowered(f"no constants of {dtype}")
        with np.errstate(over="ignore"):
            array = np.asarray(data).astype(NUMPY[dtype])
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self._initializer(array, f"const_{len(self._constants)}")
        return self._constants[key]

    def shared(self, key: Hashable, write: Callable[[], ir.Value]) -> ir.Value:
        """What ``write`` writes, once for all operators that ask for the same ``key``."""
        if key not in self._shared:
            self._shared[key] = write()
        return self._shared[key]

    def ints(self, data: Sequence[int]) -> ir.Value:
        """A constant int64 vector."""
        return self.constant(list(data) if len(data) else np.zeros(0, np.int64), torch.int64)

    def dims(self, dims: Sequence[Dim | ir.Value]) -> ir.Value:
        """An int64 vector of sizes, some of which may be symbolic, or int64 vectors computed in the graph."""
        if all(isinstance(d, int) for d in dims):
            return self.ints([d for d in dims if isinstance(d, int)])
        pieces: list[ir.Value] = []
        run: list[int] = []
        for d in dims:
            if isinstance(d, (fx.Node, ir.Value)):
                if run:
                    pieces.append(self.ints(run))
                    run = []
                pieces.append(d if isinstance(d, ir.Value) else self.value(d))
            else:
                run.append(int(d))
        if run:
            pieces.append(self.ints(run))
        return pieces[0] if len(pieces) == 1 else self.op("Concat", *pieces, axis=0)

    def shape(self, node: fx.Node, value: ir.Value | None = None) -> ir.Value:
        """Shape of the tensor of ``node`` (read from ``value`` when given) as an int64 vector."""
        val = shape_of(node)
        if all(isinstance(d, int) for d in val):
            return self.ints(list(val))
        return self.op("Shape", self.value(node) if value is None else value)

    def reshape(self, value: ir.Value, dims: Sequence[Dim]) -> ir.Value:
        """``value`` reshaped; one symbolic size is written as -1 so that the target is a constant."""
        symbolic = [i for i, d in enumerate(dims) if isinstance(d, fx.Node)]
        if len(symbolic) == 1 and all(d != 0 for d in dims if isinstance(d, int)):
            return self.op("Reshape", value, self.ints([-1 if isinstance(d, fx.Node) else d for d in dims]))
        return self.op("Reshape", value, self.dims(dims), allowzero=1)

    def pad(
        self,
        value: ir.Value,
        rank: int,
        first: int,
        before: Sequence[Dim | ir.Value],
        after: Sequence[Dim | ir.Value],
        fill: ir.Value | None = None,
        mode: str = "constant",
    ) -> ir.Value:
        """``value`` of that rank padded in its dimensions from ``first`` on; negative amounts cut away.

        The amounts are written for every dimension, not with ``axes``: ONNX Runtime 1.19 misreads those when it
        moves a transposition past the padding. Known amounts to cut are cut first: it reads past the end where that
        leaves nothing to be padded.
        """
        last = rank - first - len(before)
        if mode == "constant" and len(before) == len(after):  # a vector that is computed may stand for several
            cut, before, after = self._cut(value, first, before, after)
            if cut is not value and not any(not isinstance(d, int) or d for d in (*before, *after)):
                return cut
            value = cut
        full = [[0] * first + list(amounts) + [0] * last for amounts in (before, after)]
        return self.op("Pad", value, self.dims(full[0] + full[1]), fill, mode=mode)

    def _cut(
        self, value: ir.Value, first: int, before: Sequence[Dim | ir.Value], after: Sequence[Dim | ir.Value]
    ) -> tuple[ir.Value, list[Dim | ir.Value], list[Dim | ir.Value]]:
        """``value`` without what negative amounts cut away, and the other amounts, with zeros in their place."""
        known = [[d if isinstance(d, int) else 0 for d in amounts] for amounts in (before, after)]
        cut = [i for i, pair in enumerate(zip(*known, strict=True)) if min(pair) < 0]
        if cut:
            starts = [max(0, -known[0][i]) for i in cut]
            ends = [min(0, known[1][i]) or np.iinfo(np.int64).max for i in cut]
            axes = [first + i for i in cut]
            value = self.op("Slice", value, self.ints(starts), self.ints(ends), self.ints(axes))
        rest = [[max(0, d) if isinstance(d, int) else d for d in amounts] for amounts in (before, after)]
        return value, rest[0], rest[1]

    def _initializer(self, array: np.ndarray, name: str) -> ir.Value:
        value = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            shape=ir.Shape(array.shape),
            const_value=ir.Tensor(array, name=name),
        )
        self.initializers.append(value)
        return value


def _is_zero(value: ir.Value) -> bool:
    """Whether ``value`` is the scalar constant 0, whose bits are all 0."""
    constant = value.const_value
    return constant is not None and not constant.shape and not any(constant.tobytes())


def _note_sizes(value: Any, val: Any) -> None:
    """Note the sizes of the fake tensors ``val`` at their ONNX values."""
    if isinstance(value, (tuple, list)) and isinstance(val, (tuple, list)):
        for v, x in zip(value, val, strict=False):
            _note_sizes(v, x)
    elif isinstance(value, ir.Value) and isinstance(val, torch.Tensor):
        value.meta[SIZES] = tuple(d if isinstance(d, int) else None for d in val.shape)
