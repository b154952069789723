"""The description of a model's inputs and outputs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ort.validation import require

__all__ = [
    "Description",
    "DescriptionError",
    "Input",
    "Output",
    "ResultError",
    "TypedInput",
    "TypedOutput",
    "check_results",
    "describe",
    "gather",
    "summary",
]


class DescriptionError(ValueError, IndexError):
    """A ``model_desc`` that does not follow its schema.

    A ``ValueError``; an ``IndexError`` as well, because some of them came as that from ONNX Runtime.
    """


class Input(NamedTuple):
    """One input.

    Attributes:
        name: its name.
        shape: a number for a fixed size, a name for one that may change from call to call.
    """

    name: str
    shape: list[str | int]

    @property
    def dtype(self) -> torch.dtype | None:
        """Element type; not known before the first call."""
        return None

    def typed(self, dtype: torch.dtype) -> TypedInput:
        """The same with an element type."""
        return TypedInput(self.name, self.shape, dtype)


class TypedInput(NamedTuple):
    """One input whose element type is known; see :class:`Input`."""

    name: str
    shape: list[str | int]
    dtype: torch.dtype

    def typed(self, dtype: torch.dtype) -> TypedInput:
        """The same with another element type."""
        return self._replace(dtype=dtype)


class Output(NamedTuple):
    """One output; ``is_loss`` marks the one that is minimized. See :class:`Input`."""

    name: str
    shape: list[str | int]
    is_loss: bool = False

    def typed(self, dtype: torch.dtype) -> TypedOutput:
        """The same with an element type."""
        return TypedOutput(*self, dtype)


class TypedOutput(NamedTuple):
    """One output whose element type is known; see :class:`Output`."""

    name: str
    shape: list[str | int]
    is_loss: bool
    dtype: torch.dtype

    def typed(self, dtype: torch.dtype) -> TypedOutput:
        """The same with another element type."""
        return self._replace(dtype=dtype)


@dataclasses.dataclass
class Description:
    """All inputs and outputs, in order: named tuples, which get the element types at the first call."""

    inputs: list[Input | TypedInput]
    outputs: list[Output | TypedOutput]

    @property
    def loss(self) -> int | None:
        """Number of the output that is the loss."""
        return next((i for i, output in enumerate(self.outputs) if output.is_loss), None)

    def set_types(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Take over the element types of a call."""
        self.inputs[:] = [e.typed(x.dtype) for e, x in zip(self.inputs, inputs, strict=True)]
        self.outputs[:] = [e.typed(y.dtype) for e, y in zip(self.outputs, outputs, strict=True)]

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
        raise DescriptionError(f"Invalid model_desc: {dict(sorted(errors.items(), key=lambda item: str(item[0])))}")
    return Description(
        [Input(name, list(shape)) for name, shape in model_desc["inputs"]],
        [Output(o[0], list(o[1]), *o[2:]) for o in model_desc["outputs"]],
    )


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
    if any(isinstance(size, int) and size < 0 for size in shape):
        return "each shape must be a size, from 0; name one that may change"
    if not name or "" in shape:
        return "a name must not be empty"
    if len(entry) == 3 and not isinstance(entry[2], bool):
        return "the third element of the tuple (aka is_loss) must be a boolean"
    return None


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
    require(
        len(args) <= len(entries),
        f"{len(args)} inputs were given in order, but the model has {len(entries)} ({listed}).",
    )
    given = {entry.name: value for entry, value in zip(entries, args, strict=False)}
    twice = [name for name in kwargs if name in given]
    require(not twice, f"Inputs given both in order and by name: {', '.join(twice)}.")
    unknown = [name for name in kwargs if name not in {entry.name for entry in entries}]
    require(not unknown, f"The model has no inputs {', '.join(map(repr, unknown))}; its inputs are {listed}.")
    given |= kwargs
    missing = [entry.name for entry in entries if entry.name not in given]
    require(not missing, f"Missing inputs: {', '.join(missing)}. The model's inputs are {listed}.")
    tensors = [given[entry.name] for entry in entries]
    sizes: dict[str, tuple[int, str]] = {}
    for entry, tensor in zip(entries, tensors, strict=True):
        _check_input(entry, tensor, sizes)
    return tensors


def _check_input(entry: Input | TypedInput, tensor: Any, sizes: dict[str, tuple[int, str]]) -> None:
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
            require(known == size, f"Mismatch in dynamic shape {name}: {known} in {where!r}, {size} in {entry.name!r}")


def _shape_problem(entry: Input | TypedInput | Output | TypedOutput, tensor: Tensor) -> str:
    """What is wrong with the shape, or an empty string."""
    got, expected = list(tensor.shape), entry.shape
    if len(got) != len(expected):
        return f"got {len(got)} dimensions {got}, expected {len(expected)} {expected}"
    for i, (size, wanted) in enumerate(zip(got, expected, strict=True)):
        if isinstance(wanted, int) and size != wanted:
            return f"index {i} got: {size} expected: {wanted}"
    return ""


class ResultError(RuntimeError):
    """The outputs of a model are not those described."""


def check_results(description: Description, results: Sequence[Any]) -> None:
    """Raise unless the outputs of the model are those described.

    Raises:
        ResultError: names what differs.
    """
    entries = description.outputs
    if len(results) != len(entries):
        raise ResultError(
            f"The model gives {len(results)} outputs, but model_desc describes {len(entries)} "
            f"({', '.join(description.output_names())})."
        )
    for entry, result in zip(entries, results, strict=True):
        if not isinstance(result, Tensor):
            raise ResultError(f"Output {entry.name!r} is a {type(result).__name__}; expected a torch.Tensor.")
        if entry.is_loss and result.numel() != 1:
            raise ResultError(f"The loss {entry.name!r} has shape {list(result.shape)}; expected one number.")
        problem = "" if entry.is_loss else _shape_problem(entry, result)
        if problem:
            raise ResultError(f"Output {entry.name!r} is not as described in model_desc: {problem}")


_ABOUT_VALUES = re.compile(r"\b(index|indices|target|class|classes|label|labels|range|bounds)\b", re.IGNORECASE)
"""in messages that may mean an entry of an input by the number that they have"""


def summary(description: Description, tensors: Sequence[Tensor], message: str) -> str:
    """The inputs of a failed step in words; those that hold a number of which the message speaks are pointed out."""
    lines, suspects = [], []
    for entry, tensor in zip(description.inputs, tensors, strict=True):
        line = f"{entry.name!r}: {tensor.dtype} {list(tensor.shape)}"
        if tensor.numel() and not tensor.is_floating_point() and tensor.dtype != torch.bool:
            low, high = (int(bound) for bound in tensor.aminmax())
            line += f", values {low} to {high}"
            if _ABOUT_VALUES.search(message) and any(
                f" {bound} " in f" {message} ".replace(".", " ") for bound in (low, high)
            ):
                suspects.append(entry.name)
        lines.append(line)
    hint = f" Input {suspects[0]!r} holds that value." if len(suspects) == 1 else ""
    return f"{hint} The inputs were {'; '.join(lines)}. Nothing was updated."
