"""Use what builds of ONNX Runtime for training have for gradients."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

__all__ = ["TrainingKernelsPass"]

_DOMAIN = "com.microsoft"


class TrainingKernelsPass(ir.passes.InPlacePass):
    """Replace the standard operators of the gradient of the mean cross-entropy of two-dimensional scores by one.

    The loss itself is left as it is: the operator for it reads what lies beside the scores when a label is no class.
    ``ReluGrad`` is not used: it makes 0 of the gradient where the argument is NaN, and is no faster than a choice.

    Nodes that are no longer read remain; other passes remove them.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        ShapeInferencePass(strict_mode=False)(model)  # ONNX fails at values that it computes of some constants
        for node in list(model.graph):
            if node.op_type == "Mul":
                new = _cross_entropy_gradient(model.graph, node)
                if new is not None:
                    ir.convenience.replace_nodes_and_values(model.graph, node, [node], [new], node.outputs, new.outputs)
                    modified = True
        if modified:
            model.graph.opset_imports[_DOMAIN] = 1
        return ir.passes.PassResult(model, modified=modified)


def _cross_entropy_gradient(graph: ir.Graph, node: ir.Node) -> ir.Node | None:
    """(exp(log_prob) - one-hot labels) * counts / max(number of labels that count, 1)"""
    errors, share = _made_by(node.inputs[0], "ScatterElements"), _made_by(node.inputs[1], "Div")
    if errors is None or share is None or errors.attributes["axis"].as_int() != 1:
        return None
    probabilities, minus_ones = _made_by(errors.inputs[0], "Exp"), _made_by(errors.inputs[2], "Neg")
    total = _made_by(share.inputs[1], "Clip")
    ones = share.inputs[0]
    if probabilities is None or minus_ones is None or total is None or ones is None:
        return None
    count, labels = _made_by(total.inputs[0], "ReduceSum"), _labels(ones, errors.inputs[1])
    if count is None or minus_ones.inputs[0] is not ones or count.inputs[0] is not ones or labels is None:
        return None
    if _constant(total.inputs[1]) != 1:
        return None
    log_prob, (vector, ignored) = probabilities.inputs[0], labels
    one = ir.Value(name=f"{node.name}/one", const_value=ir.tensor(np.ones((), np.float32), name=f"{node.name}/one"))
    graph.register_initializer(one)
    return ir.node(
        "SoftmaxCrossEntropyLossGrad",
        [one, log_prob, vector],
        attributes={"ignore_index": ignored, "reduction": "mean"},
        domain=_DOMAIN,
        name=node.name,
    )


def _labels(ones: ir.Value, index: ir.Value | None) -> tuple[ir.Value, int] | None:
    """The vector of labels that ``index`` holds and ``ones`` counts, and the label that does not count."""
    cast, remainder = _made_by(ones, "Cast"), _made_by(index, "Mod")
    product = None if remainder is None else _made_by(remainder.inputs[0], "Mul")
    negation = None if cast is None else _made_by(cast.inputs[0], "Not")
    if cast is None or product is None or negation is None or cast.attributes["to"].as_int() != ir.DataType.FLOAT:
        return None
    equal, counts = _made_by(negation.inputs[0], "Equal"), _made_by(product.inputs[1], "Cast")
    if equal is None or counts is None or counts.inputs[0] is not cast.inputs[0]:
        return None
    column, ignored = _made_by(equal.inputs[0], "Unsqueeze"), _constant(equal.inputs[1])
    if column is None or product.inputs[0] is not equal.inputs[0] or ignored is None:
        return None
    vector = column.inputs[0]
    if vector is None or vector.shape is None or len(vector.shape) != 1 or _constant(column.inputs[1]) != 1:
        return None
    return vector, int(ignored)


def _constant(value: ir.Value | None) -> float | None:
    """The only element of a constant."""
    constant = None if value is None else value.const_value
    return None if constant is None or constant.size != 1 else constant.numpy().item()


def _made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type and not node.domain else None
