"""Tensors of users that are called like what artifacts add: refused before a file is written."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper, numpy_helper

from lightning_ort.ondevice import OptimizerConfig, generate_artifacts

SUM = "w_grad.accumulation"


def network(x, w, y):
    nodes = [
        helper.make_node("MatMul", [x, w], [y]),
        helper.make_node("Tanh", [y], ["q"]),
        helper.make_node("ReduceMean", ["q"], ["loss"], keepdims=0),
    ]
    inputs = [helper.make_tensor_value_info(x, 1, ["N", 4])]
    outputs = [helper.make_tensor_value_info("loss", 1, []), helper.make_tensor_value_info(y, 1, ["N", 4])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [numpy_helper.from_array(np.eye(4, dtype=np.float32), w)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(("flavour", "kind", "name", "meant"), [
    ("portable", "Result", "w_grad", "the gradient of 'w'"),
    ("ort-training", "Result", "w_grad", "the gradient of 'w'"),
    ("portable", "Result", "new/w", "the next value of 'w'"),
    ("portable", "Input", "new/w", "the next value of 'w'"),
    ("portable", "Result", "optimizer/step", "the numbers and moments"),
    ("portable", "Input", "optimizer/learning_rate", "the numbers and moments"),
    ("portable", "Parameter", "optimizer/learning_rate", "the numbers and moments"),
    ("ort-training", "Result", "lazy_reset_grad", "what starts sums of gradients anew"),
    ("ort-training", "Parameter", "lazy_reset_grad", "what starts sums of gradients anew"),
    ("ort-training", "Result", f"{SUM}.buffer", "the sum of a gradient"),
    ("ort-training", "Result", f"{SUM}.out", "the sum of a gradient"),
])  # fmt: skip
def test_a_name_that_means_something_else(flavour, kind, name, meant, tmp_path):
    names = {"Input": "x", "Parameter": "w", "Result": "y"} | {kind: name}
    model = network(*names.values())
    with pytest.raises(ValueError, match=rf"^{kind} '{name}' is called like {meant}.*\. Rename it: "):
        generate_artifacts(model, tmp_path, optimizer=OptimizerConfig("SGD"), flavour=flavour)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["optimizer/step", "lazy_reset_grad", "new/x"])
def test_a_name_that_is_free_where_nothing_has_it(name, tmp_path):
    flavour = "portable" if name == "lazy_reset_grad" else "ort-training"
    found = generate_artifacts(network("x", "w", name), tmp_path, optimizer=OptimizerConfig("SGD"), flavour=flavour)
    assert found.train.outputs == ("loss", name)
