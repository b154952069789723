"""The description of a model's inputs and outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["Description", "DescriptionError", "Output", "describe"]


class DescriptionError(ValueError, IndexError):
    """A ``model_desc`` that does not follow its schema.

    A ``ValueError``; an ``IndexError`` as well, because some of them came as that from ONNX Runtime.
    """


@dataclasses.dataclass
class _Entry:
    """One input or output.

    Attributes:
        name: its name.
        shape: a number for a fixed size, a name for one that may change from call to call.
        dtype: element type, known after the first call.
    """

    name: str
    shape: list[str | int]
    dtype: torch.dtype | None = None


@dataclasses.dataclass
class Output(_Entry):
    """One output; ``is_loss`` marks the one that is minimized."""

    is_loss: bool = False


@dataclasses.dataclass
class Description:
    """All inputs and outputs, in order."""

    inputs: list[_Entry]
    outputs: list[Output]

    @property
    def loss(self) -> int | None:
        """Number of the output that is the loss."""
        return next((i for i, output in enumerate(self.outputs) if output.is_loss), None)

    def output_names(self) -> list[str]:
        """Names of all outputs."""
        return [output.name for output in self.outputs]


def describe(model_desc: Any) -> Description:
    """Check and convert ``{"inputs": [(name, shape)], "outputs": [(name, shape, is_loss)]}``.

    Raises:
        AssertionError: it is no dictionary.
        DescriptionError: it does not follow the schema; the message lists all that is wrong.
    """
    if not isinstance(model_desc, Mapping):
        raise AssertionError(f"'model_desc' must be a 'dict', not {type(model_desc).__name__}")
    errors: dict[Any, Any] = {key: ["unknown field"] for key in model_desc if key not in ("inputs", "outputs")}
    for key in ("inputs", "outputs"):
        if key not in model_desc:
            errors[key] = ["required field"]
            continue
        entries = model_desc[key]
        if not isinstance(entries, list):
            errors[key] = ["must be of list type"]
        elif not entries:
            errors[key] = ["min length is 1"]
        else:
            found = _entry_errors(entries, outputs=key == "outputs")
            if found:
                errors[key] = [found]
    if errors:
        raise DescriptionError(f"Invalid model_desc: {errors}")
    inputs = [_Entry(name, list(shape)) for name, shape in model_desc["inputs"]]
    outputs = [Output(o[0], list(o[1]), is_loss=len(o) > 2 and o[2]) for o in model_desc["outputs"]]
    return Description(inputs, outputs)


def _entry_errors(entries: Sequence[Any], *, outputs: bool) -> dict[int, list[str]]:
    errors: dict[int, list[str]] = {}
    names: set[str] = set()
    loss_seen = False
    for i, entry in enumerate(entries):
        problem = _problem(entry, outputs=outputs)
        if problem is None:
            if entry[0] in names:
                problem = f"the name {entry[0]!r} occurs twice"
            names.add(entry[0])
            is_loss = len(entry) > 2 and entry[2]
            if is_loss and loss_seen:
                problem = "only one is_loss can be set to True"
            loss_seen |= is_loss
        if problem is not None:
            errors[i] = [problem]
    return errors


def _problem(entry: Any, *, outputs: bool) -> str | None:
    sizes = (2, 3) if outputs else (2,)
    if not isinstance(entry, tuple) or len(entry) not in sizes:
        return f"must be a tuple with size {' or '.join(map(str, sizes))}"
    name, shape = entry[:2]
    if not isinstance(name, str):
        return "the first element of the tuple (aka name) must be a string"
    if not isinstance(shape, list):
        return "the second element of the tuple (aka shape) must be a list"
    if any(not isinstance(size, (str, int)) or isinstance(size, bool) for size in shape):
        return "each shape must be either a string or integer"
    if len(entry) == 3 and not isinstance(entry[2], bool):
        return "the third element of the tuple (aka is_loss) must be a boolean"
    return None
