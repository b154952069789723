"""Sizes of inputs that stay open in an exported graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["Axes", "check_axes", "default_axes", "other_sizes", "resized", "sizes_of"]

Axes = Mapping[str, Mapping[int, str]]
"""Input name to dimension to the name of its size."""


def default_axes(names: Sequence[str], tensors: Sequence[Tensor]) -> Axes:
    """The first dimension of the first input is the batch, and of all inputs that have the same size there."""
    batch = next((t.shape[0] for t in tensors if t.ndim), None)
    return {name: {0: "batch"} for name, t in zip(names, tensors, strict=True) if t.ndim and t.shape[0] == batch}


def check_axes(axes: Axes, names: Sequence[str], tensors: Sequence[Tensor]) -> Axes:
    """``axes`` with dimensions counted from the first.

    Raises:
        ValueError: they name inputs or dimensions that there are not, or one size that differs in the sample.
    """
    unknown = [name for name in axes if name not in names]
    if unknown:
        raise ValueError(f"dynamic names the inputs {unknown}, but the inputs are {list(names)}.")
    found: dict[str, dict[int, str]] = {}
    sizes: dict[str, int] = {}
    for name, tensor in zip(names, tensors, strict=True):
        for axis, size in axes.get(name, {}).items():
            if not isinstance(axis, int) or not -tensor.ndim <= axis < tensor.ndim:
                raise ValueError(
                    f"dynamic[{name!r}] names dimension {axis!r} of an input of shape {tuple(tensor.shape)}."
                )
            if not isinstance(size, str) or not size.isidentifier():
                raise ValueError(f"dynamic[{name!r}][{axis}] is {size!r}: expected a name, such as 'batch'.")
            there = tensor.shape[axis]
            if sizes.setdefault(size, there) != there:
                raise ValueError(
                    f"dynamic names two dimensions {size!r}, but one is {sizes[size]} long and that of {name!r} "
                    f"{there}. Give them two names."
                )
            if there == 0:
                raise ValueError(f"dimension {axis} of input {name!r} is empty. Give a sample with something in it.")
            found.setdefault(name, {})[axis % tensor.ndim] = size
    return found


def sizes_of(axes: Axes, names: Sequence[str], tensors: Sequence[Tensor]) -> dict[str, int]:
    """Name of each open size to what it is in ``tensors``."""
    return {
        size: tensor.shape[axis]
        for name, tensor in zip(names, tensors, strict=True)
        for axis, size in axes.get(name, {}).items()
    }


def resized(axes: Axes, names: Sequence[str], tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> list[Tensor]:
    """``tensors`` with other ``sizes``: cut off, or repeated from the beginning."""
    found = []
    for name, tensor in zip(names, tensors, strict=True):
        for axis, size in axes.get(name, {}).items():
            there = tensor.shape[axis]
            if sizes[size] != there:
                rows = torch.arange(sizes[size], device=tensor.device) % there
                tensor = tensor.index_select(axis, rows)
        found.append(tensor)
    return found


def other_sizes(sizes: Mapping[str, int]) -> Iterator[tuple[str, dict[str, int]]]:
    """Name of an open size, and all sizes with another value of that one: 1, 2, 3 and one more than it is."""
    for name, there in sizes.items():
        for value in sorted({1, 2, 3, there + 1} - {there}):
            yield name, {**sizes, name: value}
