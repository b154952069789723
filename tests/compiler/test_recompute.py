"""Values that are computed again where the backward pass needs them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

from lightning_ort.compiler import ORTBackend
from lightning_ort.compiler.passes import save_memory
from lightning_ort.compiler.passes.recompute import SIZES


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
        nodes[-1].outputs[0].meta[SIZES] = (size, size)
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


class Scaled(nn.Module):
    """A layer that keeps its input divided by its root mean square, and that times a weight, for the backward pass."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features) + 0.5)
        self.up, self.down = nn.Linear(features, 2 * features), nn.Linear(2 * features, features)

    def forward(self, x):
        scaled = self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))
        return x + self.down(self.up(scaled).relu())


def test_a_node_that_two_values_are_made_of_is_computed_again_for_each(monkeypatch):
    models = []
    monkeypatch.setattr(
        "lightning_ort.compiler.plan.save_memory", lambda model: models.append(model) or save_memory(model)
    )
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 16), *[Scaled(16) for _ in range(4)])
    step = torch.compile(lambda x: module(x).square().mean(), backend=ORTBackend(on_unsupported="error"))
    for batch in (5, 7):
        module.zero_grad()
        x = torch.randn(batch, 3, 16)
        step(x).backward()
        got = [p.grad.clone() for p in module.parameters()]
        module.zero_grad()
        module(x).square().mean().backward()
        for p, gradient in zip(module.parameters(), got, strict=True):
            torch.testing.assert_close(gradient, p.grad, rtol=1e-4, atol=1e-6)
    names = [n.name for n in models[-1].graph]
    assert len(set(names)) == len(names)
    assert any(n.endswith("_again_2") for n in names), "the network does not show what it is for"
