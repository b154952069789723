"""Correspondence of torch, ONNX and numpy element types: ``onnx_ir`` has it, sessions take a part of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from onnx_ir.tensor_adapters import from_torch_dtype

__all__ = ["NUMPY", "ONNX", "TORCH", "cpu_tensor", "is_supported", "owning"]

_BOUND = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip

ONNX: dict[torch.dtype, ir.DataType] = {dtype: from_torch_dtype(dtype) for dtype in _BOUND}

TORCH: dict[int, torch.dtype] = {onnx: dtype for dtype, onnx in ONNX.items()}
"""by ``ir.DataType``, which are the numbers of ``TensorProto.DataType``"""

# numpy itself has no bfloat16
NUMPY: dict[torch.dtype, type[np.generic]] = {
    dtype: onnx.numpy().type for dtype, onnx in ONNX.items() if dtype != torch.bfloat16
}


def is_supported(dtype: torch.dtype) -> bool:
    """Whether tensors of ``dtype`` can be bound to a session."""
    return dtype in ONNX


_NATIVE = {np.dtype(numpy) for numpy in NUMPY.values()}


def cpu_tensor(value: Any, name: str) -> torch.Tensor:
    """A contiguous tensor on the CPU, which shares memory with a writable array or OrtValue where it can.

    Args:
        value: a numpy array or scalar, an OrtValue or a torch tensor.
        name: of it, for messages.

    Raises:
        TypeError: something else.
        ValueError: an array of an element type that sessions do not take, or not in this machine's byte order.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().contiguous()
    if isinstance(value, onnxruntime.OrtValue):
        value = value.numpy()
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name!r} is a {type(value).__name__}; expected a numpy array, an OrtValue or a torch tensor.")
    if value.dtype not in _NATIVE:
        raise ValueError(f"{name!r} is {value.dtype}, which no tensor can hold.")
    if not (value.flags.c_contiguous and value.flags.writeable):
        value = value.copy(order="C")
    return torch.from_numpy(value)


def owning(array: np.ndarray) -> onnxruntime.OrtValue:
    """An OrtValue with a copy of ``array`` on the CPU.

    One made by ``ortvalue_from_numpy`` shares the memory of the array and keeps it alive, but what its ``numpy()``
    gives does not: ``module(x).numpy()`` would be a view of memory that is free.
    """
    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype)
    value.update_inplace(np.ascontiguousarray(array))
    return value
