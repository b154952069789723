"""Values that are computed again where the backward pass needs them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from lightning_ort.compiler.passes import save_memory


def _model(*, operand_stays: bool, size: int = 512) -> ir.Model:
    """y = view(x' * scale) is used early and, after many nodes, again; ``operand_stays`` gives x' a later use."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([size, size]))
    scale = ir.Value(name="scale", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([size]))
    shape = ir.Value(
        name="shape",
        type=ir.TensorType(ir.DataType.INT64),
        shape=ir.Shape([2]),
        const_value=ir.Tensor(np.array([size, size]), name="shape"),
    )
    nodes: list[ir.Node] = []

    def op(op_type, *inputs):
        nodes.append(ir.node(op_type, list(inputs), name=f"{op_type}_{len(nodes)}"))
        nodes[-1].outputs[0].name = f"v{len(nodes)}"
        return nodes[-1].outputs[0]

    kept = op("Tanh", x)
    y = op("Reshape", op("Mul", kept, scale), shape)
    z = op("MatMul", y, x)
    for _ in range(60):
        z = op("Sin", z)
    z = op("MatMul", z, y)
    if operand_stays:
        z = op("Sub", z, kept)
    z.type, z.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([size, size])
    graph = ir.Graph([x, scale], [z], nodes=nodes, initializers=[shape], opset_imports={"": 20}, name="g")
    return ir.Model(graph, ir_version=10)


def _run(model: ir.Model) -> np.ndarray:
    rng = np.random.default_rng(0)
    shapes = [tuple(v.shape) for v in model.graph.inputs]
    feeds = {v.name: rng.standard_normal(s, dtype=np.float32) for v, s in zip(model.graph.inputs, shapes, strict=True)}
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def test_a_late_use_gets_a_copy_of_the_operators():
    model = _model(operand_stays=True)
    expected = _run(model)
    assert save_memory(model)
    names = [n.name for n in model.graph]
    again = [i for i, n in enumerate(names) if n.endswith("_again")]
    assert [names[i].split("_")[0] for i in again] == ["Mul", "Reshape"]
    assert names[again[-1] + 1].startswith("MatMul"), "the copies are not where they are needed"
    np.testing.assert_array_equal(_run(model), expected)


@pytest.mark.parametrize("options", [{"operand_stays": False}, {"operand_stays": True, "size": 32}])
def test_nothing_is_kept_longer_for_it_and_small_values_stay(options):
    model = _model(**options)
    nodes = len(model.graph)
    assert not save_memory(model)
    assert len(model.graph) == nodes
