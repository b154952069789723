"""Names in the portable files besides those of parameters and buffers, and of element types."""

from __future__ import annotations

import torch

from lightning_ort.runtime.dtypes import ONNX

__all__ = ["DTYPES", "LEARNING_RATE", "NEW", "STEP", "dtype_name", "moment_name"]

LEARNING_RATE = "optimizer/learning_rate"
STEP = "optimizer/step"
NEW = "new/"
"""prefix of an output that is the next value of the input of that name"""


DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in ONNX}
"""name of each element type"""


def dtype_name(dtype: torch.dtype) -> str:
    """As numpy and the ONNX Runtime of JavaScript call it."""
    return str(dtype).removeprefix("torch.")


def moment_name(state: str, parameter: str) -> str:
    """Of one optimizer state of one parameter."""
    return f"optimizer/{state}/{parameter}"
