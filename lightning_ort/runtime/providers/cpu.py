"""The provider that every build has, and what its kernels do in this build."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper

from lightning_ort.errors import ProviderError
from lightning_ort.runtime.providers.provider import Provider

__all__ = ["CPU", "cpu_session", "gives", "has_training_kernels", "has_vector_where", "session_of_node"]

_LARGE_CONVOLUTION = 1e7
"""Operations of a convolution from which oneDNN's lead is more than leaving a session and entering the next one costs:
it was 1.1 to 2 times as fast there, 2.5 to 3.5 times with groups (stacks of four layers, forward and backward, batch
16 to 32, 8 to 128 channels, 8x8 to 64x64 pixels, 2 cores)."""


class _CPU(Provider):
    reads_in_place = True

    @property
    def large_convolution(self) -> float:
        onednn = torch.backends.mkldnn
        return _LARGE_CONVOLUTION if onednn.is_available() and onednn.enabled else math.inf

    def check(self, given: Mapping[str, str]) -> None:
        if given:
            raise ProviderError(
                f"provider_options has {', '.join(map(repr, given))} for {self.name}, which has none and heeds "
                "nothing. What it does is said by session_options, such as {'enable_cpu_mem_arena': False}."
            )


CPU = _CPU("CPUExecutionProvider")


def cpu_session(
    model: bytes | str | Path, options: onnxruntime.SessionOptions | None = None
) -> onnxruntime.InferenceSession:
    """ONNX Runtime's own session on the CPU, for what no training runs.

    Args:
        model: serialized, or a path.
        options: by default one thread, and nothing in the log.
    """
    if options is None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=[CPU.name])


@functools.cache
def has_vector_where() -> bool:
    """Whether the CPU kernel of ``Where`` takes several elements at a time.

    Of 100,000 numbers of random sign, ONNX Runtime 1.19 and 1.20 choose in 380 µs, 1.22 to 1.31 in 60, as long as a
    comparison and a product take them.
    """
    return tuple(int(n) for n in onnxruntime.__version__.split(".")[:2]) >= (1, 22)


@functools.cache
def gives(op_type: str, number: float, expected: float, *, double: bool = False) -> bool:
    """Whether the kernel of an operator of one argument makes ``expected`` of ``number``, in float32 or in float64.

    ONNX Runtime 1.19 makes NaN of the root of infinity, 1 of the error function of NaN, and a little more than 0 of the
    exponential of -inf in float64.
    """
    dtype, element = (np.float64, TensorProto.DOUBLE) if double else (np.float32, TensorProto.FLOAT)
    x, y = (helper.make_tensor_value_info(name, element, [16]) for name in ("x", "y"))
    session = session_of_node(helper.make_node(op_type, ["x"], ["y"]), [x], y)
    (result,) = session.run(None, {"x": np.full(16, number, dtype)})
    return bool(np.array_equal(result, np.full(16, expected, dtype), equal_nan=True))


@functools.cache
def has_training_kernels() -> bool:
    """Whether this build has the operators of gradients (``onnxruntime-training``), which stock builds lack."""
    y, dy, dx = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("y", "dy", "dx"))
    node = helper.make_node("ReluGrad", ["dy", "y"], ["dx"], domain="com.microsoft")
    try:
        session_of_node(node, [dy, y], dx)
    except Exception:  # its errors have no common class; each of them means no
        return False
    return True


def session_of_node(
    node: onnx.NodeProto,
    inputs: list[onnx.ValueInfoProto],
    output: onnx.ValueInfoProto,
    options: onnxruntime.SessionOptions | None = None,
) -> onnxruntime.InferenceSession:
    """:func:`cpu_session` of a single operator."""
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "node", inputs, [output]), opset_imports=opsets, ir_version=10)
    return cpu_session(model.SerializeToString(), options)
