"""Operators of opset 18 in those of opsets 12 to 17, run beside each other."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

from lightning_ort.errors import ExportError
from lightning_ort.export.older_opsets import convert

X, V = np.random.default_rng(0).standard_normal((2, 3, 4), np.float32), np.array([0.5, 2, -1, 3], np.float32)
WHOLE = {
    "a type": "float[n,3,4] x, float[4] v) => (float[n,3,4] y) { c = CastLike(v, x) y = Add(x, c) }",
    "layer norm": "float[n,3,4] x, float[4] v) => (float[n,3,4] y) { y = LayerNormalization<epsilon=0.1>(x, v, v) }",
    "layer norm of two": (
        "float[n,3,4] x, float[4] v) => (float[n,3,4] y) <float[3,4] w = {1,2,3,4,5,6,7,8,9,1,2,3}> "
        "{ y = LayerNormalization<axis=1>(x, w) }"
    ),
    "mish": "float[n,3,4] x, float[4] v) => (float[n,3,4] y) { y = Mish(x) }",
    "hard swish": "float[n,3,4] x, float[4] v) => (float[n,3,4] y) { y = HardSwish(x) }",
    "mean": "float[n,3,4] x, float[4] v) => (float[n,1,4] y) <int64[1] a = {1}> { y = ReduceMean(x, a) }",
    "all": "float[n,3,4] x, float[4] v) => (float y) { y = ReduceMax<keepdims=0>(x) }",
    "sum": (
        "float[n,3,4] x, float[4] v) => (float[n] y) "
        "{ a = Constant<value_ints=[-1, 1]>() y = ReduceSum<keepdims=0>(x, a) }"
    ),
    "squeezed": (
        "float[n,3,4] x, float[4] v) => (float[n,3,4] y) <int64[1] a = {1}> "
        "{ u = Unsqueeze(x, a) s = Squeeze(u, a) y = Mul(s, v) }"
    ),
    "a part of a shape": (
        "float[n,3,4] x, float[4] v) => (float[m,k] y) <int64[1] one = {-1}> "
        "{ s = Shape<start=1, end=2>(x) t = Concat<axis=0>(s, one) y = Reshape<allowzero=1>(x, t) }"
    ),
    "split": "float[n,3,4] x, float[4] v) => (float[n,3,2] y) { y, z = Split<axis=2, num_outputs=2>(x) }",
    "split by sizes": (
        "float[n,3,4] x, float[4] v) => (float[n,3,3] y) <int64[2] s = {3, 1}> { y, z = Split<axis=2>(x, s) }"
    ),
    "softmax": "float[n,3,4] x, float[4] v) => (float[n,3,4] y) { s = Softmax<axis=2>(x) y = LogSoftmax(s) }",
    "softmax of another dimension": "float[n,3,4] x, float[4] v) => (float[n,3,4] y) { y = Softmax<axis=-2>(x) }",
    "resize": (
        "float[n,3,4] x, float[4] v) => (float[n,3,8] y) <float[3] s = {1, 1, 2}> "
        '{ y = Resize<mode="nearest", antialias=0>(x, "", s) }'
    ),
    "a branch": (
        "float[n,3,4] x, float[4] v) => (float[n,3,4] y) { c = Constant<value_int=1>() d = Cast<to=9>(c) "
        "y = If(d) <then_branch = t () => (a) { a = Mish(x) }, else_branch = e () => (b) { b = Identity(x) }> }"
    ),
}


def model(text):
    return ir.from_proto(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> agraph ({text}'))


def typed(graph):
    return ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(graph)))


def run(graph):
    session = onnxruntime.InferenceSession(ir.to_proto(graph).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {i.name: {"x": X, "v": V}[i.name] for i in session.get_inputs()})[0]


@pytest.mark.stock_only
@pytest.mark.parametrize("opset", [12, 13, 14, 16, 17])
@pytest.mark.parametrize("name", WHOLE)
def test_operators_compute_the_same(name, opset):
    graph = typed(model(WHOLE[name]))
    wanted = run(graph)
    convert(graph, opset)
    onnx.checker.check_model(ir.to_proto(graph), full_check=True)
    assert graph.opset_imports == {"": opset}
    assert graph.ir_version == (7 if opset <= 14 else 8)
    np.testing.assert_allclose(run(graph), wanted, rtol=0, atol=2e-6)


@pytest.mark.stock_only
@pytest.mark.parametrize(
    ("text", "opset", "message"),
    [
        ("float[2,3] x) => (float[2,3] y) { z = DFT(x) y = Identity(x) }", 14, "DFT came with opset 17"),
        ("float[2,3] x, int64[1] a) => (float[2,1] y) { y = ReduceMax(x, a) }", 14, "ReduceMax has axes that are comp"),
        ("float[2,3] x) => (float[2,3] y) { y = ReduceMax<noop_with_empty_axes=1>(x) }", 14, "noop_with_empty_axes=1"),
        (
            "float[2,3] x, int64[2,1] i, float[2,1] u) => (float[2,3] y) "
            '{ y = ScatterElements<axis=1, reduction="add">(x, i, u) }',
            14, "ScatterElements has reduction='add', which came with a later opset",
        ),
        (
            "float[2,3] x, int64[2] p, int64[1] a) => (float[2,m] y) <float c = {0}> { y = Pad(x, p, c, a) }", 14,
            "Pad has an input 'axes'",
        ),
        ("float[n,3] x) => (float[m,3] y) { y, z = Split<axis=0, num_outputs=2>(x) }", 14, "Split has parts of diff"),
        ("float[0,3] x) => (float[0,4] y) <int64[2] s = {0, 4}> { y = Reshape<allowzero=1>(x, s) }", 13, "size of 0"),
        ("float[1,1,2,2] x, float[1,1,1,2] g) => (float[1,1,1,1] y) { y = GridSample(x, g) }", 14, "GridSample came"),
    ],
)  # fmt: skip
def test_what_an_opset_lacks_is_refused(text, opset, message):
    with pytest.raises(ExportError, match=rf"ONNX opset {opset} cannot express this model: .*{message}.*newer opset"):
        convert(typed(model(text)), opset)


@pytest.mark.stock_only
def test_operators_of_onnx_runtime_stand_in_if_they_may():
    graph = model("float[1,1,2,2] x, float[1,1,1,2] g) => (float[1,1,1,1] y) { y = GridSample(x, g) }")
    feed = {"x": np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2), "g": np.zeros((1, 1, 1, 2), np.float32)}
    convert(graph, 14, contrib=True)
    assert graph.opset_imports == {"": 14, "com.microsoft": 1}
    session = onnxruntime.InferenceSession(ir.to_proto(graph).SerializeToString())
    assert session.run(None, feed)[0].item() == 1.5
