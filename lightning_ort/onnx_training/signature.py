"""A tiny model with the inputs, outputs and metadata of a training session, which has ``NodeArg`` objects."""

from __future__ import annotations

import onnx
import onnxruntime
from onnx import TensorProto, helper

__all__ = ["signature_session"]


def signature_session(
    model: onnx.ModelProto, learning_rate: str | None, extra: list[onnx.ValueInfoProto]
) -> onnxruntime.InferenceSession:
    """A session that describes a training session of ``model``, and computes nothing.

    Args:
        learning_rate: name of the input of the learning rate.
        extra: outputs besides those of ``model``.
    """
    initializers = {i.name for i in model.graph.initializer}
    inputs = [i for i in model.graph.input if i.name not in initializers]
    if learning_rate is not None:
        inputs.append(helper.make_tensor_value_info(learning_rate, TensorProto.FLOAT, [1]))
    outputs = [*model.graph.output, *extra]
    # a tensor of unknown shape for every output, so that the declared shapes stand
    nodes = [
        helper.make_node("Constant", [], ["one"], value_float=1.0),
        helper.make_node("NonZero", ["one"], ["indices"]),
        helper.make_node("Reshape", ["indices", "minus_one"], ["shape"]),
        helper.make_node("Constant", [], ["minus_one"], value_ints=[-1]),
    ]
    nodes.insert(1, nodes.pop())
    for value in outputs:
        dtype = value.type.tensor_type.elem_type
        tensor = helper.make_tensor("value", dtype, [1], [0])
        nodes.append(helper.make_node("ConstantOfShape", ["shape"], [value.name], value=tensor))
    graph = helper.make_graph(nodes, model.graph.name or "training", inputs, outputs, doc_string=model.graph.doc_string)
    described = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    described.producer_name = model.producer_name
    described.domain, described.model_version = model.domain, model.model_version
    described.doc_string = model.doc_string
    described.metadata_props.extend(model.metadata_props)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(described.SerializeToString(), options, providers=["CPUExecutionProvider"])
