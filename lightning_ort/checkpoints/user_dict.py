"""The user's own data in a checkpoint, as JSON."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lightning_ort.errors import DamagedFileError
from lightning_ort.files.reading import refusing

__all__ = ["decode", "encode"]

# pickle.dumps({}) in all its protocols
_EMPTY = {pickle.dumps({}, protocol=p).hex() for p in range(pickle.HIGHEST_PROTOCOL + 1)}


def encode(user_dict: Mapping[str, Any]) -> str:
    """JSON of nested dictionaries, lists, tuples, strings, numbers, bools, ``None``, numpy arrays and tensors.

    Raises:
        TypeError: something else; the message says where.
    """
    if not isinstance(user_dict, Mapping):
        raise TypeError(f"'user_dict' must be a dict, not {type(user_dict).__name__}")
    return json.dumps(_pack(dict(user_dict), "user_dict"))


def _pack(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [_pack(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [_pack(v, f"{where}[{i}]") for i, v in enumerate(value)]}
    if isinstance(value, dict):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: _pack(v, f"{where}[{k!r}]") for k, v in value.items()}
        return {"$dict": [[_pack(k, f"{where} key"), _pack(v, f"{where}[{k!r}]")] for k, v in value.items()]}
    if isinstance(value, torch.Tensor) and value.dtype != torch.bfloat16:
        return {"$tensor": _array(value.detach().cpu().numpy())}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        return {"$array": _array(np.asarray(value))}
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold. It can hold dictionaries, lists, "
        "tuples, strings, numbers, None, numpy arrays and tensors."
    )


def _array(array: np.ndarray) -> list[Any]:
    return [array.dtype.str, list(array.shape), base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()]


def decode(text: str, where: str, *, allow_pickle: bool) -> dict[str, Any]:
    """What :func:`encode` was given, or what ONNX Runtime pickled.

    Args:
        text: what is in the file.
        where: of which file it is what, for messages.
        allow_pickle: execute what was pickled.

    Raises:
        CheckpointError: it is damaged.
        ValueError: it is pickled and ``allow_pickle`` is not set.
    """
    with refusing(where, "damaged"):
        if not isinstance(text, str):
            raise DamagedFileError("it is no text")
        if text.lstrip().startswith("{"):
            return dict(_unpack(json.loads(text)))
    if text in _EMPTY:
        return {}
    if not allow_pickle:
        raise ValueError(
            f"{where} is pickled, and unpickling executes whatever the author of the file put into it. If you trust "
            "the file, load it with allow_pickle=True."
        )
    with refusing(where, "damaged"):
        return dict(pickle.loads(bytes.fromhex(text)))


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(v) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, content),) = value.items()
        if key == "$tuple":
            return tuple(_unpack(v) for v in content)
        if key == "$dict":
            return {_unpack(k): _unpack(v) for k, v in content}
        if key in ("$array", "$tensor"):
            dtype, shape, data = content
            array = np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
            return torch.from_numpy(array) if key == "$tensor" else array
    return {k: _unpack(v) for k, v in value.items()}
