"""Correspondence of torch, ONNX and numpy element types."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

__all__ = ["NUMPY", "ONNX", "is_supported", "owning"]

ONNX: dict[torch.dtype, ir.DataType] = {
    torch.float32: ir.DataType.FLOAT,
    torch.float64: ir.DataType.DOUBLE,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.int64: ir.DataType.INT64,
    torch.int32: ir.DataType.INT32,
    torch.int16: ir.DataType.INT16,
    torch.int8: ir.DataType.INT8,
    torch.uint8: ir.DataType.UINT8,
    torch.bool: ir.DataType.BOOL,
}

NUMPY: dict[torch.dtype, type[np.generic]] = {  # numpy has no bfloat16
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
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
