"""A traced graph as an ONNX model with the names of the file it came from."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx
import onnx_ir as ir
import torch
from onnx import helper

from lightning_ort.compiler.aot.inputs import InputInfo, input_infos
from lightning_ort.compiler.aot.joint import GRAD, NEW, Joint
from lightning_ort.compiler.aot.random import write_draw
from lightning_ort.compiler.aot.sizes import size_text
from lightning_ort.compiler.dynamo_words import source_line
from lightning_ort.compiler.lowering import GraphBuilder, NotLowered
from lightning_ort.compiler.passes import optimize
from lightning_ort.errors import UnsupportedError
from lightning_ort.runtime.tensors import ONNX

__all__ = ["described", "written"]


def written(joint: Joint, proto: onnx.ModelProto, fed: Collection[str] = ()) -> ir.Model:
    """``joint`` as a model whose inputs, initializers and outputs are called as in ``proto``.

    Sizes are declared as there, unless operators require more of them.

    Args:
        fed: initializers that become inputs.

    Raises:
        UnsupportedError: a node of the ONNX file whose value or gradient has no ONNX form.
    """
    if input_infos(proto) != joint.infos:
        proto = described(joint, [o.name for o in proto.graph.output])
    builder = GraphBuilder()
    for node in joint.traced.graph.nodes:
        try:
            if node in joint.traced.draws:
                write_draw(builder, node, joint.traced.inputs)
            elif node.op == "placeholder":
                builder.add_input(node)
            elif node.op == "get_attr":
                builder.add_initializer(node, getattr(joint.traced.module, str(node.target)))
            elif node.op == "call_function":
                builder.lower(node)
        except NotLowered as reason:
            if node.target == torch.ops.aten.cumprod.default:
                raise UnsupportedError(
                    "The ONNX graph cannot be differentiated: the gradient of a product (ReduceProd) along an axis "
                    f"whose size is open has no ONNX form. Declare {', '.join(joint.names.values())} as numbers."
                ) from None
            place = source_line(node).rsplit(": ", 1)[-1] or str(node.target)
            raise UnsupportedError(
                f"The ONNX graph cannot be differentiated: value or gradient of {place} has no ONNX form: {reason}."
            ) from None
    model = optimize(builder.model(list(joint.results.values())))
    for name, value in zip(joint.results, model.graph.outputs, strict=True):
        value.name = name
    _rename_inputs(model, {node.name: name for name, node in joint.inputs.items()})
    for value in list(model.graph.inputs):
        tensor = joint.tensors.get(str(value.name))
        if tensor is not None and value.name not in fed:
            model.graph.inputs.remove(value)
            value.const_value = ir.tensor(tensor.detach().contiguous(), name=value.name)
            model.graph.register_initializer(value)
    _restore_inputs(model, proto)
    _pass_through(model, joint)
    _declare_outputs(model, proto, joint)
    return model


def described(joint: Joint, outputs: Sequence[str]) -> onnx.ModelProto:
    """A model that has nothing but the inputs of ``joint`` and some of its results, as they are to be declared."""
    results = []
    for name in outputs:
        fake = joint.results[name].meta["val"]
        shape = tuple(size_text(s, joint.names) for s in fake.shape)
        results.append(_value_info(InputInfo(name, fake.dtype, shape)))
    return helper.make_model(helper.make_graph([], "step", [_value_info(i) for i in joint.infos], results))


def _value_info(info: InputInfo) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(info.name, int(ONNX[info.dtype]), list(info.shape))


def _rename_inputs(model: ir.Model, names: dict[str, str]) -> None:
    """Give the inputs of ``model`` their ONNX names; values inside that have such a name make way."""
    taken = set(names.values()) | {str(o.name) for o in model.graph.outputs}
    inside = [v for node in model.graph for v in node.outputs if not v.is_graph_output()]
    for value in inside:
        if value.name in taken:
            value.name = f"{value.name}_inside"
    for value in list(model.graph.initializers.values()):
        if value.name in taken:
            del model.graph.initializers[str(value.name)]
            value.name = f"{value.name}_inside"
            model.graph.register_initializer(value)
    for value in model.graph.inputs:
        value.name = names[str(value.name)]


def _restore_inputs(model: ir.Model, proto: onnx.ModelProto) -> None:
    """Inputs as the file declares them, also those that nothing reads, then what is fed besides."""
    found = {v.name: v for v in model.graph.inputs}
    model.graph.inputs.clear()
    initializers = {i.name for i in proto.graph.initializer}
    for info in proto.graph.input:
        if info.name not in initializers:
            value = found.pop(info.name, None) or ir.Value(name=info.name)
            _declare(value, info)
            model.graph.inputs.append(value)
    model.graph.inputs.extend(found.values())


def _pass_through(model: ir.Model, joint: Joint) -> None:
    """Outputs that are an input or an initializer are that value itself: a name stands for one value."""
    sources = {v.name: v for v in [*model.graph.initializers.values(), *model.graph.inputs]}
    for position, (name, node) in enumerate(joint.results.items()):
        if joint.inputs.get(name) is node:
            copy = model.graph.outputs[position].producer()
            model.graph.outputs[position] = sources[name]
            if copy is not None:
                model.graph.remove(copy, safe=True)


def _declare_outputs(model: ir.Model, proto: onnx.ModelProto, joint: Joint) -> None:
    """Outputs as the file declares them, gradients like that of which they are the gradient."""
    declared = {o.name: o for o in proto.graph.output}
    shapes = {f"{v.name}{GRAD}": v.shape for v in model.graph.inputs}
    for name, tensor in joint.tensors.items():
        shapes[f"{name}{GRAD}"] = shapes[f"{name}{NEW}"] = ir.Shape(tensor.shape)
    for value in model.graph.outputs:
        name = str(value.name)
        if value.is_graph_input() or value.is_initializer():
            continue
        if name in declared:
            _declare(value, declared[name])
        else:
            value.shape = shapes[name]


def _declare(value: ir.Value, info: onnx.ValueInfoProto) -> None:
    declared = ir.serde.deserialize_value_info_proto(info, None)
    value.type, value.shape = declared.type, declared.shape
