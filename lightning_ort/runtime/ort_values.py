"""OrtValues that may outlive what they were made from."""

from __future__ import annotations

import numpy as np
import onnxruntime

__all__ = ["owning"]


def owning(array: np.ndarray) -> onnxruntime.OrtValue:
    """An OrtValue with a copy of ``array`` on the CPU.

    One made by ``ortvalue_from_numpy`` shares the memory of the array and keeps it alive, but what its ``numpy()``
    gives does not: ``module(x).numpy()`` would be a view of memory that is free.
    """
    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype)
    value.update_inplace(np.ascontiguousarray(array))
    return value
