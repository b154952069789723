"""What the installed ONNX Runtime can do beside the standard."""

from __future__ import annotations

import functools

import onnxruntime
from onnx import TensorProto, helper

__all__ = ["has_training_kernels"]


@functools.cache
def has_training_kernels() -> bool:
    """Whether this build has the operators of gradients (``onnxruntime-training``), which stock builds lack."""
    y, dy, dx = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("y", "dy", "dx"))
    node = helper.make_node("ReluGrad", ["dy", "y"], ["dx"], domain="com.microsoft")
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "probe", [dy, y], [dx]), opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # its errors have no common class; each of them means no
        return False
    return True
