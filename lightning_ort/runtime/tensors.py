"""Correspondence of torch, ONNX and numpy element types: ``onnx_ir`` has it, sessions take a part of it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from onnx_ir.tensor_adapters import from_torch_dtype

__all__ = ["NUMPY", "ONNX", "TORCH", "is_supported", "owning"]

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


def owning(array: np.ndarray) -> onnxruntime.OrtValue:
    """An OrtValue with a copy of ``array`` on the CPU.

    One made by ``ortvalue_from_numpy`` shares the memory of the array and keeps it alive, but what its ``numpy()``
    gives does not: ``module(x).numpy()`` would be a view of memory that is free.
    """
    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype)
    value.update_inplace(np.ascontiguousarray(array))
    return value
