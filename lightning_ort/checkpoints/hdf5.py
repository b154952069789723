"""HDF5 files of others as nested dictionaries: plain arrays of the file itself, and nothing that leads elsewhere."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np

from lightning_ort.errors import DamagedFileError
from lightning_ort.files.reading import check_growth

__all__ = ["read_group"]

_DEEPEST = 16
"""Groups within groups; a checkpoint has four."""


def read_group(file: h5py.File, size: int) -> dict[str, Any]:
    """All groups and datasets of an open file.

    HDF5 lets a dataset take its values from any other file, a name stand for another one, and a group contain itself.
    No checkpoint has any of these, and who opens a file that does gets what its author wanted him to read.

    Args:
        file: the file.
        size: its bytes.

    Returns:
        Nested dictionaries of arrays, numbers, bools and strings.

    Raises:
        DamagedFileError: values outside of the file, links, objects, or far more values than the file has bytes.
        OSError, RuntimeError, ...: HDF5 cannot read it.
    """
    datasets: list[tuple[dict[str, Any], str, h5py.Dataset]] = []
    content = _listed(file, datasets, set(), 0)
    # all shapes before the first value
    check_growth(size, sum(item.nbytes for _, _, item in datasets), "what it holds")
    for group, key, item in datasets:
        group[key] = _value(item)
    return content


def _listed(
    group: h5py.Group, datasets: list[tuple[dict[str, Any], str, h5py.Dataset]], seen: set[Any], depth: int
) -> dict[str, Any]:
    if depth > _DEEPEST:
        raise DamagedFileError(f"its groups are nested more than {_DEEPEST} deep")
    found: dict[str, Any] = {}
    for key in group:
        where = f"{group.name.rstrip('/')}/{key}"
        link = group.get(key, getlink=True)
        if not isinstance(link, h5py.HardLink):
            raise DamagedFileError(f"{where!r} is a link to somewhere else ({type(link).__name__}), which is not read")
        item = group[key]
        address = h5py.h5o.get_info(item.id).addr
        if address in seen:
            raise DamagedFileError(f"{where!r} is a second name of something else in the file, which is not read")
        seen.add(address)
        if isinstance(item, h5py.Group):
            found[key] = _listed(item, datasets, seen, depth + 1)
        elif isinstance(item, h5py.Dataset):
            _check(item, where)
            datasets.append((found, key, item))
            found[key] = None
        else:
            raise DamagedFileError(f"the entry {where!r} is neither a group nor a dataset")
    return found


def _check(item: h5py.Dataset, where: str) -> None:
    if item.external or item.id.get_create_plist().get_external_count():
        raise DamagedFileError(f"the values of {where!r} are said to lie in another file, which is not read")
    if item.is_virtual:
        raise DamagedFileError(f"{where!r} is a virtual dataset, made of other files, which are not read")
    string = h5py.check_string_dtype(item.dtype) is not None
    if item.shape is None:
        raise DamagedFileError(f"{where!r} holds nothing")
    if item.dtype.kind not in "biuf" and not (string and item.shape == ()):
        raise DamagedFileError(f"{where!r} holds {item.dtype} of shape {item.shape}; expected numbers, or one text")


def _value(item: h5py.Dataset) -> Any:
    value = item[()]
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.generic) and np.ndim(value) == 0:
        return value.item()
    return value
