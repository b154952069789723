"""What users feed, as torch tensors that the graph accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
import torch

from lightning_ort.onnx_gradients.inputs import InputInfo

__all__ = ["as_feed", "as_scalar"]


def as_feed(infos: Sequence[InputInfo], given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """One contiguous CPU tensor per input.

    Raises:
        ValueError: an input is missing or unknown, or has another element type or fixed size than declared.
    """
    names = [i.name for i in infos]
    missing, unknown = [n for n in names if n not in given], [n for n in given if n not in names]
    if missing or unknown:
        parts = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"unknown: {', '.join(unknown)}"] * bool(unknown)
        raise ValueError(f"The feed does not fit the inputs ({'; '.join(parts)}). Inputs: {', '.join(names)}.")
    return {i.name: _checked(i, as_tensor(i.name, given[i.name])) for i in infos}


def as_tensor(name: str, value: Any) -> torch.Tensor:
    """A numpy array, OrtValue, torch tensor, number or list as a CPU tensor."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().contiguous()
    if isinstance(value, onnxruntime.OrtValue):
        value = value.numpy()
    array = np.ascontiguousarray(value)
    array = array.reshape(np.shape(value))  # ascontiguousarray makes a vector of a scalar
    try:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except TypeError as error:
        raise ValueError(f"Input {name!r} is {array.dtype}, which no tensor can hold.") from error


def _checked(info: InputInfo, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype != info.dtype:
        raise ValueError(f"Input {info.name!r} is {tensor.dtype}; expected {info.dtype}.")
    fits = len(tensor.shape) == len(info.shape) and all(
        isinstance(d, str) or d == s for d, s in zip(info.shape, tensor.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"Input {info.name!r} has shape {tuple(tensor.shape)}; expected {list(info.shape)}.")
    return tensor


def as_scalar(name: str, value: Any) -> float:
    """A number from whatever holds exactly one.

    Raises:
        ValueError: it holds none or several, or is not finite.
    """
    tensor = as_tensor(name, value)
    if tensor.numel() != 1:
        raise ValueError(f"Input {name!r} has shape {tuple(tensor.shape)}; expected one number.")
    number = float(tensor)
    if not np.isfinite(number):
        raise ValueError(f"Input {name!r} is {number}; expected a finite number.")
    return number
