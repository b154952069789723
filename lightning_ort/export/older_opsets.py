"""Graphs of opset 18 in the operators of older opsets, as far as these have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import defs, helper

from lightning_ort.errors import ExportError

__all__ = ["NEWEST", "convert"]

_OLDEST, NEWEST = 12, 18

_Rewrite = Callable[["_Conversion", ir.Node], None]
_REWRITES: dict[str, tuple[int, _Rewrite]] = {}
"""operator to the opset below which it is rewritten, and how"""


def convert(model: ir.Model, opset: int, *, contrib: bool = False) -> None:
    """Write ``model``, of opset 18, in operators of ``opset``.

    Args:
        model: changed in place.
        opset: 12 to 18.
        contrib: use ONNX Runtime's own operators for those that this opset lacks.

    Raises:
        ExportError: an operator cannot be expressed; all of them are named.
    """
    assert _OLDEST <= opset <= NEWEST, opset
    conversion = _Conversion(opset, contrib=contrib)
    refused: dict[str, None] = {}
    for node in list(model.graph.all_nodes()):
        try:
            conversion.rewrite(node)
        except _No as reason:
            refused[str(reason)] = None
    if refused:
        raise ExportError(
            f"ONNX opset {opset} cannot express this model: {'; '.join(refused)}. Use a newer opset: export_onnx() and "
            f"strategy.export() write {NEWEST} to 21."
        )
    model.graph.opset_imports[""] = opset
    if conversion.used_contrib:
        model.graph.opset_imports["com.microsoft"] = 1
    imports = [helper.make_opsetid(domain, version) for domain, version in model.graph.opset_imports.items()]
    model.ir_version = helper.find_min_ir_version_for(imports, ignore_unknown=True)


class _No(Exception):
    pass


class _Conversion:
    """What is written for one opset."""

    def __init__(self, opset: int, *, contrib: bool) -> None:
        self.opset, self.contrib, self.used_contrib = opset, contrib, False

    def rewrite(self, node: ir.Node) -> None:
        """Put ``node`` in terms of the older opset."""
        if node.domain:
            return
        below, rewritten = _REWRITES.get(node.op_type, (0, None))
        if rewritten is not None and self.opset < below:
            rewritten(self, node)
        else:
            self.check(node)

    def check(self, node: ir.Node) -> None:
        """Leave ``node`` as it is, if it means the same in the older opset: newer types apart, its form is in it."""
        new = defs.get_schema(node.op_type, NEWEST, "")
        try:
            old = defs.get_schema(node.op_type, self.opset, "")
        except defs.SchemaError:
            raise _No(f"{node.op_type} came with opset {_first(node.op_type)}") from None
        if old.since_version == new.since_version:
            return
        for name, attribute in list(node.attributes.items()):
            if name in old.attributes:
                continue
            default = helper.get_attribute_value(new.attributes[name].default_value)
            value = attribute.value.encode() if isinstance(attribute.value, str) else attribute.value
            if value != default:
                raise _No(f"{node.op_type} has {name}={attribute.value!r}, which came with a later opset")
            del node.attributes[name]
        given = [i for i, value in enumerate(node.inputs) if value is not None]
        if given and given[-1] >= len(old.inputs) and not _is_variadic(old):
            raise _No(f"{node.op_type} has an input {new.inputs[given[-1]].name!r}, which came with a later opset")
        if len(node.inputs) > len(old.inputs) and not _is_variadic(old):
            node.resize_inputs(len(old.inputs))

    def replace(self, node: ir.Node, result: ir.Value, nodes: Sequence[ir.Node]) -> None:
        """Put ``nodes``, in order, in the place of ``node``, whose one used output is ``result`` from now on."""
        assert node.graph is not None
        value = node.outputs[0]
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], list(nodes), [value], [result])


class _Nodes:
    """New nodes in the place of one."""

    def __init__(self, node: ir.Node) -> None:
        self._node, self.nodes = node, list[ir.Node]()

    def __call__(self, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        like = self._node.outputs[0]
        new = ir.node(op_type, list(inputs), attributes, domain=domain, name=f"{self._node.name}/{len(self.nodes)}")
        new.metadata_props.update(self._node.metadata_props)
        new.outputs[0].type = like.type
        self.nodes.append(new)
        return new.outputs[0]

    def constant(self, array: np.ndarray) -> ir.Value:
        """An array that is known."""
        value = self("Constant", value=ir.tensor(array))
        value.type = ir.TensorType(ir.tensor(array).dtype)
        return value


def _rewrites(*op_types: str, below: int) -> Callable[[_Rewrite], _Rewrite]:
    def register(function: _Rewrite) -> _Rewrite:
        _REWRITES.update(dict.fromkeys(op_types, (below, function)))
        return function

    return register


def _axes_to_attribute(conversion: _Conversion, node: ir.Node) -> None:
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    noop = node.attributes.pop("noop_with_empty_axes", None)
    if axes is not None:
        known = ir.convenience.get_const_tensor(axes)
        if known is None:
            raise _No(f"{node.op_type} has axes that are computed")
        numbers = [int(n) for n in known.numpy().reshape(-1)]
        if numbers:
            node.attributes["axes"] = ir.AttrInt64s("axes", numbers)
        axes_given = bool(numbers)
    else:
        axes_given = False
    if noop is not None and noop.as_int() and not axes_given:
        raise _No(f"{node.op_type} has noop_with_empty_axes=1, which came with a later opset")
    node.resize_inputs(1)


_rewrites(
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSumSquare", below=18,
)(_axes_to_attribute)  # fmt: skip
_rewrites("ReduceSum", "Squeeze", "Unsqueeze", below=13)(_axes_to_attribute)


@_rewrites("LayerNormalization", below=17)
def _layer_normalization(conversion: _Conversion, node: ir.Node) -> None:
    x, scale, bias = [*node.inputs, None][:3]
    if any(output.uses() for output in node.outputs[1:]) or x is None or x.dtype is None or x.shape is None:
        raise _No("LayerNormalization gives its statistics, or is of an input of unknown shape, before opset 17")
    single = x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    wide = x.dtype if single else ir.DataType.FLOAT
    first = node.attributes.get_int("axis", -1)
    axes = list(range(first, 0)) if first < 0 else [axis - len(x.shape) for axis in range(first, len(x.shape))]
    op = _Nodes(node)
    value = x if single else op("Cast", x, to=int(wide))
    centered = op("Sub", value, op("ReduceMean", value, axes=axes, keepdims=1))
    variance = op("ReduceMean", op("Mul", centered, centered), axes=axes, keepdims=1)
    epsilon = op.constant(np.array(node.attributes.get_float("epsilon", 1e-5), wide.numpy()))
    result = op("Div", centered, op("Sqrt", op("Add", variance, epsilon)))
    if not single:
        for value in [v for n in op.nodes for v in n.outputs]:
            value.type = ir.TensorType(wide)
        result = op("Cast", result, to=int(x.dtype))
    result = op("Mul", result, scale)
    conversion.replace(node, result if bias is None else op("Add", result, bias), op.nodes)


@_rewrites("CastLike", below=15)
def _cast_like(conversion: _Conversion, node: ir.Node) -> None:
    x, like = node.inputs
    dtype = node.outputs[0].dtype
    if dtype is None and like is not None:
        dtype = like.dtype
    if dtype is None:
        raise _No("CastLike, to a type that is not known, came with opset 15")
    op = _Nodes(node)
    conversion.replace(node, op("Cast", x, to=int(dtype)), op.nodes)


@_rewrites("Reshape", below=14)
def _reshape(conversion: _Conversion, node: ir.Node) -> None:
    known = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
    # a size that is computed is 0 for an empty tensor alone
    if node.attributes.pop("allowzero", None) is not None and known is not None and 0 in known.numpy():
        raise _No("Reshape to a size of 0 came with opset 14")


@_rewrites("Resize", below=13)
def _resize(conversion: _Conversion, node: ir.Node) -> None:
    conversion.check(node)
    op = _Nodes(node)
    assert node.graph is not None
    for index in (1, 2):  # not optional yet
        if node.inputs[index] is None:
            node.replace_input_with(index, op.constant(np.zeros(0, np.float32)))
    node.graph.insert_before(node, op.nodes)


@_rewrites("Mish", below=18)
def _mish(conversion: _Conversion, node: ir.Node) -> None:
    op = _Nodes(node)
    conversion.replace(node, op("Mul", node.inputs[0], op("Tanh", op("Softplus", node.inputs[0]))), op.nodes)


@_rewrites("HardSwish", below=14)
def _hard_swish(conversion: _Conversion, node: ir.Node) -> None:
    op = _Nodes(node)
    gate = op("HardSigmoid", node.inputs[0], alpha=1 / 6, beta=0.5)
    conversion.replace(node, op("Mul", node.inputs[0], gate), op.nodes)


@_rewrites("Shape", below=15)
def _shape(conversion: _Conversion, node: ir.Node) -> None:
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", np.iinfo(np.int64).max)
    if "start" not in node.attributes and "end" not in node.attributes:
        return
    op = _Nodes(node)
    bounds = [op.constant(np.array([n], np.int64)) for n in (start, end)]
    conversion.replace(node, op("Slice", op("Shape", node.inputs[0]), *bounds), op.nodes)


@_rewrites("Split", below=18)
def _split(conversion: _Conversion, node: ir.Node) -> None:
    number = node.attributes.pop("num_outputs", None)
    x, axis = node.inputs[0], node.attributes.get_int("axis", 0)
    if number is not None:
        size = None if x is None or x.shape is None else x.shape[axis]
        if not isinstance(size, int) or size % number.as_int():  # older ones cut into equal parts
            raise _No("Split has parts of different or unknown sizes that only num_outputs tells, before opset 18")
    elif conversion.opset < 13 and len(node.inputs) > 1:
        known = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
        if known is None:
            raise _No("Split has sizes that are computed, before opset 13")
        node.attributes["split"] = ir.AttrInt64s("split", known.numpy().tolist())
        node.resize_inputs(1)


@_rewrites("Softmax", "LogSoftmax", "Hardmax", below=13)
def _softmax(conversion: _Conversion, node: ir.Node) -> None:
    x, axis = node.inputs[0], node.attributes.get_int("axis", -1)
    if axis != -1 and (x is None or x.shape is None):
        raise _No(f"{node.op_type} is along a dimension of an input of unknown shape, before opset 13")
    rank = 0 if x is None or x.shape is None else len(x.shape)
    # older ones take all dimensions from the axis on together
    if axis == -1 or axis % rank == rank - 1:
        node.attributes["axis"] = ir.AttrInt64("axis", -1)
        return
    swapped = list(range(rank))
    swapped[axis], swapped[-1] = swapped[-1], swapped[axis]
    op = _Nodes(node)
    result = op(node.op_type, op("Transpose", x, perm=swapped), axis=-1)
    conversion.replace(node, op("Transpose", result, perm=swapped), op.nodes)


@_rewrites("GridSample", below=16)
def _grid_sample(conversion: _Conversion, node: ir.Node) -> None:
    if not conversion.contrib:
        raise _No("GridSample came with opset 16")
    conversion.used_contrib = True
    op = _Nodes(node)
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    result = op("GridSample", *node.inputs, domain="com.microsoft", **attributes)
    conversion.replace(node, result, op.nodes)


def _is_variadic(schema: defs.OpSchema) -> bool:
    return bool(schema.inputs) and schema.inputs[-1].option == defs.OpSchema.FormalParameterOption.Variadic


def _first(op_type: str) -> int:
    """The opset that an operator came with."""
    return min(s.since_version for s in defs.get_all_schemas_with_history() if s.name == op_type and not s.domain)
