"""Arguments of a step: which tensor is which input, and whether it can be that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ort.trainer.description import Description, _Entry

__all__ = ["check_results", "gather", "summary"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def gather(description: Description, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """One tensor per described input, in order.

    Args:
        description: of the model.
        args: tensors in order, or one list of them.
        kwargs: the remaining ones by name.

    Raises:
        AssertionError: too many or too few, a name that is not described, an input given twice, or sizes of one name
            that differ.
        AttributeError: something that is not a tensor.
        RuntimeError: a type or shape that the input does not have.
    """
    entries = description.inputs
    listed = ", ".join(entry.name for entry in entries)
    if len(args) == 1 and isinstance(args[0], list):
        args = args[0]
    elif len(args) == 1 and isinstance(args[0], tuple):
        raise AssertionError("The inputs came as one tuple: pass them one by one, by name, or in one list.")
    _require(
        len(args) <= len(entries),
        f"{len(args)} inputs were given in order, but the model has {len(entries)} ({listed}).",
    )
    given = {entry.name: value for entry, value in zip(entries, args, strict=False)}
    twice = [name for name in kwargs if name in given]
    _require(not twice, f"Inputs given both in order and by name: {', '.join(twice)}.")
    unknown = [name for name in kwargs if name not in {entry.name for entry in entries}]
    _require(not unknown, f"The model has no inputs {', '.join(map(repr, unknown))}; its inputs are {listed}.")
    given |= kwargs
    missing = [entry.name for entry in entries if entry.name not in given]
    _require(not missing, f"Missing inputs: {', '.join(missing)}. The model's inputs are {listed}.")
    tensors = [given[entry.name] for entry in entries]
    sizes: dict[str, tuple[int, str]] = {}
    for entry, tensor in zip(entries, tensors, strict=True):
        _check_input(entry, tensor, sizes)
    return tensors


def _check_input(entry: _Entry, tensor: Any, sizes: dict[str, tuple[int, str]]) -> None:
    if not isinstance(tensor, Tensor):
        hint = ": use torch.from_numpy" if type(tensor).__module__ == "numpy" else ""
        raise AttributeError(f"Input {entry.name!r} is a {type(tensor).__name__}; expected a torch.Tensor{hint}.")
    if entry.dtype is not None and tensor.dtype != entry.dtype:
        raise RuntimeError(
            f"Unexpected input data type for {entry.name!r}. Actual: {tensor.dtype}, expected: {entry.dtype}, as in "
            "the calls before."
        )
    problem = _shape_problem(entry, tensor)
    if problem:
        raise RuntimeError(f"Got invalid dimensions for input {entry.name!r}: {problem}")
    for size, name in zip(tensor.shape, entry.shape, strict=True):
        if isinstance(name, str):
            known, where = sizes.setdefault(name, (size, entry.name))
            _require(known == size, f"Mismatch in dynamic shape {name}: {known} in {where!r}, {size} in {entry.name!r}")


def _shape_problem(entry: _Entry, tensor: Tensor) -> str:
    """What is wrong with the shape, or an empty string."""
    got, expected = list(tensor.shape), entry.shape
    if len(got) != len(expected):
        return f"got {len(got)} dimensions {got}, expected {len(expected)} {expected}"
    for i, (size, wanted) in enumerate(zip(got, expected, strict=True)):
        if isinstance(wanted, int) and size != wanted:
            return f"index {i} got: {size} expected: {wanted}"
    return ""


def check_results(description: Description, results: Sequence[Any]) -> None:
    """Raise unless the outputs of the model are those described.

    Raises:
        RuntimeError: names what differs.
    """
    entries = description.outputs
    if len(results) != len(entries):
        raise RuntimeError(
            f"The model gives {len(results)} outputs, but model_desc describes {len(entries)} "
            f"({', '.join(description.output_names())})."
        )
    for entry, result in zip(entries, results, strict=True):
        if not isinstance(result, Tensor):
            raise RuntimeError(f"Output {entry.name!r} is a {type(result).__name__}; expected a torch.Tensor.")
        if entry.is_loss and result.numel() != 1:
            raise RuntimeError(f"The loss {entry.name!r} has shape {list(result.shape)}; expected one number.")
        problem = "" if entry.is_loss else _shape_problem(entry, result)
        if problem:
            raise RuntimeError(f"Output {entry.name!r} is not as described in model_desc: {problem}")


def summary(description: Description, tensors: Sequence[Tensor], message: str) -> str:
    """The inputs of a failed step in words; those that hold a number of which the message speaks are pointed out."""
    lines, suspects = [], []
    for entry, tensor in zip(description.inputs, tensors, strict=True):
        line = f"{entry.name!r}: {tensor.dtype} {list(tensor.shape)}"
        if tensor.numel() and not tensor.is_floating_point() and tensor.dtype != torch.bool:
            low, high = (int(bound) for bound in tensor.aminmax())
            line += f", values {low} to {high}"
            if any(f" {bound} " in f" {message} ".replace(".", " ") for bound in (low, high)):
                suspects.append(entry.name)
        lines.append(line)
    hint = f" Input {suspects[0]!r} holds that value." if len(suspects) == 1 else ""
    return f"{hint} The inputs were {'; '.join(lines)}. Nothing was updated."
