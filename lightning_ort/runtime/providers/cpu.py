"""The provider that every build has, and what its kernels do in this build."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper

from lightning_ort.errors import ProviderError
from lightning_ort.runtime.providers.provider import Provider

__all__ = [
    "BITS",
    "CPU",
    "chooses_slowly",
    "chosen_by_bits",
    "cpu_session",
    "gives",
    "has_training_kernels",
    "session_of_node",
]

_LARGE_CONVOLUTION = 1e7
"""Operations of a convolution from which oneDNN's lead is more than leaving a session and entering the next one costs:
it was 1.1 to 2 times as fast there, 2.5 to 3.5 times with groups (stacks of four layers, forward and backward, batch
16 to 32, 8 to 128 channels, 8x8 to 64x64 pixels, 2 cores)."""

_SLOW = 6
"""times as long as a product of as many numbers: 2 to 3 where several are chosen at a time, 20 and more else"""
_FLOAT = TensorProto.FLOAT


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
def chooses_slowly() -> bool:
    """Whether the kernel of ``Where`` takes one element after the other, as it was measured just now.

    Of 100,000 numbers of a mask that is new each time, ONNX Runtime up to 1.21 and 1.32 choose in 370 to 750 µs, 1.22
    to 1.31 in 33; a product takes 8.
    """
    size = 1 << 14
    generator = np.random.default_rng(0)
    masks = [generator.random(size) < 0.5 for _ in range(5)]  # of one that is known, the processor learns the branches
    x = generator.standard_normal(size, np.float32)

    def seconds(op_type: str, first: list[np.ndarray], element: int) -> float:
        names = ("first", "x", "x") if op_type == "Where" else ("first", "x")
        inputs = [helper.make_tensor_value_info(name, t, [size]) for name, t in (("first", element), ("x", _FLOAT))]
        result = helper.make_tensor_value_info("y", _FLOAT, [size])
        session = session_of_node(helper.make_node(op_type, names, ["y"]), inputs, result)
        taken = []
        for values in first:
            began = perf_counter()
            session.run(None, {"first": values, "x": x})
            taken.append(perf_counter() - began)
        return min(taken)

    factors = [mask.astype(np.float32) for mask in masks]
    return seconds("Where", masks, TensorProto.BOOL) > _SLOW * seconds("Mul", factors, _FLOAT)


BITS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.int32: torch.int32, torch.int64: torch.int64}
"""types of numbers to the integers that have as many bits"""


@functools.cache
def chosen_by_bits() -> frozenset[torch.dtype]:
    """Numbers that products of their bits choose faster than ``Where``: 32,768 of them in 20 to 40 µs for 130 to 250.

    Reading numbers as others with the same bits is new in ONNX Runtime 1.25.
    """
    if not chooses_slowly():
        return frozenset()
    x, y = (helper.make_tensor_value_info(n, t, [1]) for n, t in (("x", _FLOAT), ("y", TensorProto.INT32)))
    try:
        session_of_node(helper.make_node("BitCast", ["x"], ["y"], to=TensorProto.INT32), [x], y, opset=26)
    except Exception:  # its errors have no common class; each of them means no
        return frozenset({torch.int32, torch.int64})
    return frozenset(BITS)


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
    *,
    opset: int = 20,
) -> onnxruntime.InferenceSession:
    """:func:`cpu_session` of a single operator."""
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "node", inputs, [output]), opset_imports=opsets, ir_version=10)
    return cpu_session(model.SerializeToString(), options)
