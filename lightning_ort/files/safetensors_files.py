"""Safetensors with a checksum for each tensor, read from one open file."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from lightning_ort.errors import DamagedFileError

__all__ = ["read_tensors", "write_tensors"]

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "F16": torch.float16, "BF16": torch.bfloat16, "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_LONGEST_HEADER = 100_000_000
"""as the library has it"""

_CHECKSUM = "crc32"
"""Further key of an entry of the header: of the metadata, the entry's name and form, and the tensor's bytes. Others
take no notice of it and do not write it, so that what they have changed is not taken for damage."""


def write_tensors(stream: IO[bytes], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write what the library ``safetensors`` reads."""
    # the largest elements first, so that all are aligned
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    start = 0
    for name in order:
        tensor = tensors[name]
        entry = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {
            **entry,
            "data_offsets": [start, start + tensor.nbytes],
            _CHECKSUM: _checksum(metadata, name, entry, _bytes_of(tensor)),
        }
        start += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        stream.write(_bytes_of(tensors[name]))


def read_tensors(stream: IO[bytes]) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """Tensors of memory of their own, the metadata, and the names of those whose checksum is wrong.

    All is read from the open file, as another may have its name before the end.

    Raises:
        DamagedFileError, ValueError, TypeError, KeyError: this is no such file.
    """
    size = stream.seek(0, 2)
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(size - 8, _LONGEST_HEADER):
        raise DamagedFileError(f"its header is said to have {length} bytes, and the file has {size}")
    header = json.loads(stream.read(length).decode(), object_pairs_hook=_without_repetition)
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedFileError("its metadata is no dictionary of texts")
    forms = {name: _form(name, entry) for name, entry in header.items()}
    end = 0
    for name, (_, _, first, last) in sorted(forms.items(), key=lambda item: item[1][2:]):
        if first != end:
            raise DamagedFileError(f"tensor {name!r} begins at {first}; expected {end}")
        end = last
    if end != size - 8 - length:
        raise DamagedFileError(f"its tensors have {end} bytes, and the file has {size - 8 - length} for them")
    tensors, wrong = {}, []
    for name, (dtype, shape, first, last) in forms.items():
        data = bytearray(last - first)
        stream.seek(8 + length + first)
        if stream.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise DamagedFileError(f"it ends within tensor {name!r}")
        entry = {"dtype": header[name]["dtype"], "shape": shape}
        if header[name].get(_CHECKSUM, wanted := _checksum(metadata, name, entry, data)) != wanted:
            wrong.append(name)
        tensors[name] = torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
    return tensors, metadata, wrong


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise DamagedFileError(f"{next(n for n in names if names.count(n) > 1)!r} occurs twice in its header")
    return found


def _form(name: str, entry: Any) -> tuple[torch.dtype, list[int], int, int]:
    """Element type, shape, and the first byte and the one after the last."""
    dtype, shape, places = _DTYPES.get(entry["dtype"]), entry["shape"], entry["data_offsets"]
    if dtype is None:
        raise DamagedFileError(f"tensor {name!r} is of type {entry['dtype']!r}, which is not known here")
    if len(places) != 2 or any(type(n) is not int or n < 0 for n in [*shape, *places]):
        raise DamagedFileError(f"tensor {name!r} has shape {shape} and lies at {places}")
    first, last = places
    if last - first != math.prod(shape) * dtype.itemsize:
        raise DamagedFileError(f"tensor {name!r} of shape {shape} has {last - first} bytes")
    return dtype, shape, first, last


def _checksum(metadata: Mapping[str, str], name: str, entry: Mapping[str, Any], data: Any) -> int:
    text = json.dumps([dict(metadata), name, entry["dtype"], entry["shape"]], sort_keys=True)
    return zlib.crc32(data, zlib.crc32(text.encode()))


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return np.ascontiguousarray(flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)).data
