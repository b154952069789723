"""What users feed, and what they get back, in the form in which they gave it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from lightning_ort.onnx_gradients.inputs import InputInfo
from lightning_ort.runtime.ort_values import owning

__all__ = ["checked", "given_back"]

_NUMPY = {
    np.dtype("float32"): torch.float32,
    np.dtype("float64"): torch.float64,
    np.dtype("float16"): torch.float16,
    np.dtype("int64"): torch.int64,
    np.dtype("int32"): torch.int32,
    np.dtype("int16"): torch.int16,
    np.dtype("int8"): torch.int8,
    np.dtype("uint8"): torch.uint8,
    np.dtype("bool"): torch.bool,
}


def checked(inputs: Sequence[Any], infos: Sequence[InputInfo]) -> list[Tensor]:
    """``inputs`` (numpy arrays, OrtValues or torch tensors) as contiguous tensors of the declared form.

    Raises:
        ValueError: another number of inputs, another element type or another size than declared, sizes of one name
            that differ.
        TypeError: something else.
    """
    if len(inputs) != len(infos):
        raise ValueError(
            f"The step takes {len(infos)} inputs ({', '.join(i.name for i in infos)}), but got {len(inputs)}."
        )
    sizes: dict[str, int] = {}
    found = []
    for value, info in zip(inputs, infos, strict=True):
        tensor = as_tensor(value, info.name)
        if tensor.dtype != info.dtype:
            raise ValueError(f"Input {info.name!r} is {tensor.dtype}; expected {info.dtype}.")
        shape = tensor.shape
        if len(shape) != len(info.shape) or not all(
            (sizes.setdefault(d, s) if isinstance(d, str) else d) == s for d, s in zip(info.shape, shape, strict=True)
        ):
            known = "".join(f", where {name} is {size}" for name, size in sizes.items() if name in info.shape)
            raise ValueError(f"Input {info.name!r} has shape {tuple(shape)}; expected {list(info.shape)}{known}.")
        found.append(tensor)
    return found


def as_tensor(value: Any, name: str) -> Tensor:
    """A contiguous tensor on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu().contiguous()
    if isinstance(value, onnxruntime.OrtValue):
        value = value.numpy()
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name!r} is a {type(value).__name__}; expected a numpy array, an OrtValue or a torch tensor.")
    if value.dtype not in _NUMPY:
        raise ValueError(f"{name!r} is {value.dtype}, which no tensor can hold.")
    if not (value.flags.c_contiguous and value.flags.writeable):
        value = value.copy(order="C")
    return torch.from_numpy(value)


def given_back(results: Sequence[Tensor], inputs: Sequence[Any]) -> Any:
    """One result, or a tuple: OrtValues if all inputs are OrtValues, tensors if all are tensors, else numpy arrays."""
    found: list[Any]
    if inputs and all(isinstance(x, onnxruntime.OrtValue) for x in inputs):
        found = [owning(r.numpy()) for r in results]
    elif inputs and all(isinstance(x, Tensor) for x in inputs):
        found = list(results)
    else:
        found = [r.numpy() for r in results]
    return found[0] if len(found) == 1 else tuple(found)
