"""Graphs without ONNX Runtime's own operators."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

from lightning_ort.compiler.passes import standardize

pytestmark = pytest.mark.stock_only

GRAPH = """
<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1]>
g (float[2,3,4] a, float[2,5,4] b, float[] n) => (float[2,3,5] out)
<float one = {1.0}>
{
   product = com.microsoft.FusedMatMul<transB=1>(a, b)
   share = Div(one, n)
   out = Mul(product, share)
}
"""


def test_fused_products_and_quotients_of_one_are_written_out():
    model = ir.from_proto(onnx.parser.parse_model(GRAPH))
    standard = ir.to_proto(standardize(model))
    assert [n.op_type for n in standard.graph.node] == ["Transpose", "MatMul", "Reciprocal", "Mul"]
    assert [o.domain for o in standard.opset_import] == [""]
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 3, 4), np.float32), rng.standard_normal((2, 5, 4), np.float32)
    session = onnxruntime.InferenceSession(standard.SerializeToString(), providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {"a": a, "b": b, "n": np.array(3, np.float32)})
    np.testing.assert_allclose(out, a @ b.transpose(0, 2, 1) / 3, rtol=1e-5, atol=1e-6)


def test_other_operators_are_refused():
    model = ir.from_proto(onnx.parser.parse_model(GRAPH.replace("FusedMatMul<transB=1>(a, b)", "BiasGelu(a, b)")))
    with pytest.raises(ValueError, match=r"com.microsoft.BiasGelu .* is no standard operator"):
        standardize(model)
