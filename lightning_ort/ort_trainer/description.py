"""Inputs and outputs as the older interface describes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ort.validation import shown, whole

__all__ = ["IODescription", "ModelDescription", "generate_sample"]


class IODescription:
    """One input or output.

    Args:
        name: its name.
        shape: sizes; names for those that may change.
        dtype: element type; the first step decides if it is left out.
        num_classes: number of classes, for :func:`generate_sample`.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """

    def __init__(
        self, name: str, shape: Sequence[int | str], dtype: torch.dtype | None = None, num_classes: int | None = None
    ) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"name={shown(name)} of an IODescription: expected a string.")
        if not isinstance(shape, (list, tuple)):
            raise TypeError(f"shape={shown(shape)} of {name!r}: expected a list of numbers and names.")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype={shown(dtype)} of {name!r}: expected a torch.dtype, or None.")
        if num_classes is not None:
            whole(f"num_classes of {name!r}", num_classes, low=1)
        self.name_, self.shape_, self.dtype_, self.num_classes_ = name, list(shape), dtype, num_classes


class ModelDescription:
    """Inputs and outputs of a model; the first output is the loss.

    Raises:
        TypeError: what is given are no lists of :class:`IODescription`.
    """

    def __init__(self, inputs: Sequence[IODescription], outputs: Sequence[IODescription]) -> None:
        for name, given in (("inputs", inputs), ("outputs", outputs)):
            if not isinstance(given, (list, tuple)) or not all(isinstance(io, IODescription) for io in given):
                raise TypeError(f"{name}={shown(given)}: expected a list of IODescription.")
        self.inputs_, self.outputs_ = list(inputs), list(outputs)


def generate_sample(desc: IODescription, device: torch.device | str | None = None) -> Tensor:
    """A made-up tensor: classes below ``num_classes`` where they are described, else normally distributed numbers.

    Args:
        desc: of the tensor; sizes that have a name are 1.
        device: where it goes.

    Raises:
        ValueError: an integer type without ``num_classes``.
    """
    sizes = [size if isinstance(size, int) else 1 for size in desc.shape_]
    if desc.num_classes_ is not None:
        return torch.randint(0, desc.num_classes_, sizes, dtype=desc.dtype_ or torch.int64, device=device)
    if desc.dtype_ is not None and not desc.dtype_.is_floating_point:
        raise ValueError(f"{desc.name_!r} is {desc.dtype_}: give num_classes to make up a sample of it.")
    return torch.randn(sizes, dtype=desc.dtype_, device=device)
