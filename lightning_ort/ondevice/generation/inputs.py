"""What a step is fed, from an example."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_ort.compiler.aot.inputs import InputInfo, usual_hints
from lightning_ort.compiler.aot.sizes import varying
from lightning_ort.export.inputs import Axes, DynamicAxes, named_axes

__all__ = ["BATCH", "Example", "arguments_of", "example_of", "hints_of", "infos_of"]

BATCH = "batch"
"""what the first size of all inputs is called unless the user says otherwise"""


@dataclasses.dataclass
class Example:
    """Example tensors by name, and the batch as a step gets it."""

    tensors: dict[str, Tensor]
    batch: Any


def arguments_of(model: nn.Module) -> tuple[list[str], int]:
    """Names of the arguments of ``forward``, and how many of them are required."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = [p for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]
    return [p.name for p in found], sum(p.default is inspect.Parameter.empty for p in found)


def example_of(inputs: Any, names: Sequence[str]) -> Example:
    """The tensors in ``inputs``.

    Args:
        inputs: tensors or arrays in a mapping, whose keys are their names, in a sequence, or nested as a batch is.
        names: for those that have no name, in order; those that remain are called ``input_<number>``.

    Raises:
        ValueError: there is no tensor, or two have one name.
    """
    batch = pytree.tree_map(lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x, inputs)
    found: dict[str, Tensor] = {}
    free = [n for n in names if not (isinstance(batch, Mapping) and n in batch)]
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if not isinstance(leaf, Tensor):
            continue
        key = path[-1] if path else None
        if isinstance(key, pytree.MappingKey):
            name = str(key.key)
        else:
            name = free.pop(0) if free else f"input_{len(found)}"
        if name in found:
            raise ValueError(f"inputs: two tensors are called {name!r}.")
        found[name] = leaf.detach().cpu()
    if not found:
        raise ValueError("inputs holds no tensor; expected an example of what a training step gets.")
    return Example(found, pytree.tree_map(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, batch))


def infos_of(tensors: Mapping[str, Tensor], dynamic_axes: DynamicAxes | None) -> list[InputInfo]:
    """Inputs with the sizes that vary.

    Args:
        dynamic_axes: per input the number of each dimension that varies to the name of that size, or a list of these
            numbers, as in ``torch.onnx.export``; by default the first of each input is called ``batch``.

    Raises:
        TypeError: it is of another form.
        ValueError: it names an input or a dimension that does not exist.

    Warns:
        UserWarning: an input is left out whose first size is as large as one that varies.
    """
    if dynamic_axes is None:
        dynamic_axes = {name: {0: BATCH} for name, tensor in tensors.items() if tensor.dim()}
    axes = named_axes("dynamic_axes", dynamic_axes)
    unknown = sorted(set(axes) - set(tensors))
    if unknown:
        raise ValueError(f"dynamic_axes: there is no input {unknown}; the inputs are {', '.join(tensors)}.")
    found = []
    for name, tensor in tensors.items():
        shape: list[int | str] = list(tensor.shape)
        for dimension, size in axes.get(name, {}).items():
            if not 0 <= dimension < len(shape):
                raise ValueError(f"dynamic_axes: {name!r} has {len(shape)} dimensions, but not number {dimension}.")
            shape[dimension] = str(size)
        found.append(InputInfo(name, tensor.dtype, tuple(shape)))
    _warn_of_left_out(tensors, axes)
    return found


def _warn_of_left_out(tensors: Mapping[str, Tensor], axes: Axes) -> None:
    """Tell of an input without a word in ``axes`` whose first size is that of another one that varies."""
    first = {tensors[name].shape[0]: str(sizes[0]) for name, sizes in axes.items() if 0 in sizes}
    for name, tensor in tensors.items():
        if name not in axes and tensor.dim() and tensor.shape[0] in first:
            size = first[tensor.shape[0]]
            warnings.warn(
                f"dynamic_axes: {name!r} is not there, so that its first size is {tensor.shape[0]} for good, as many "
                f"as {size!r} is in the example. If it varies as well, add {name!r}: {{0: {size!r}}}; if not, "
                f"{name!r}: {{}}.",
                stacklevel=2,
            )


def hints_of(infos: Sequence[InputInfo], example: Mapping[str, Tensor] | None) -> list[dict[str, int]]:
    """Sizes with which varying ones are traced: those of the example, half of them, and the usual ones.

    A module may not work with sizes that are larger than the example's (positions that it has embeddings for).
    """
    names = varying(infos)
    found = usual_hints(names)
    sizes: dict[str, int] = {}
    for info in infos:
        if example is None:
            return found
        sizes |= {s: n for s, n in zip(info.shape, example[info.name].shape, strict=True) if isinstance(s, str)}
    halves = [n // 2 if n >= 6 else 2 * n for n in sizes.values()]
    return [*(dict(zip(names, _distinct(h), strict=True)) for h in (sizes.values(), halves)), *found]


def _distinct(sizes: Iterable[int]) -> list[int]:
    """Sizes that are equal would be taken for one, and 0 and 1 for what they are."""
    found: list[int] = []
    for size in sizes:
        size = max(size, 3)
        while size in found:
            size += 1
        found.append(size)
    return found
