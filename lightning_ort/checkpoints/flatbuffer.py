"""The bytes of ONNX Runtime's checkpoint files of on-device training.

Such a file is a flatbuffer with the identifier ``ODTC``, described by ``ort_training_checkpoint.fbs`` of ONNX Runtime.
The tables that flatc makes of it are part of every build of ONNX Runtime since 1.17, so none are kept here.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Protocol, TypeVar

import flatbuffers
import torch
from torch import Tensor

from lightning_ort.errors import CheckpointError, DamagedFileError
from lightning_ort.files.reading import cause_of, check_growth
from lightning_ort.runtime.tensors import ONNX, TORCH

__all__ = ["VERSION", "CheckpointFile", "Group", "decode", "encode"]

VERSION = 2
"""version of the format, of ONNX Runtime 1.17 to 1.19"""

IDENTIFIER = b"ODTC"
# tensors below this many bytes stay in the flatbuffer, as ONNX Runtime has it
_INLINE = 64
# No private module is imported elsewhere: these are generated from a schema that old files keep as it is.
_TABLES = "onnxruntime.tools.ort_format_model.ort_flatbuffers_py.fbs"

T = TypeVar("T")


@dataclasses.dataclass
class Group:
    """State of an optimizer for a group of parameters; there is one, ``group0``.

    Attributes:
        step: number of updates that were made.
        learning_rate: the one that the file calls initial.
        moments: name of each parameter to its tensors by name: ``momentum0``, ``momentum1``.
    """

    step: int
    learning_rate: float
    moments: dict[str, dict[str, Tensor]]


@dataclasses.dataclass
class CheckpointFile:
    """What a file holds.

    Attributes:
        trained: name to tensor on the CPU.
        frozen: likewise.
        nominal: the tensors are names without values.
        groups: by name.
        properties: int, float (of 32 bits) and str.
    """

    trained: dict[str, Tensor]
    frozen: dict[str, Tensor]
    nominal: bool = False
    groups: dict[str, Group] = dataclasses.field(default_factory=dict)
    properties: dict[str, int | float | str] = dataclasses.field(default_factory=dict)


def _table(name: str) -> ModuleType:
    return importlib.import_module(f"{_TABLES}.{name}")


class _Whole(bytes):
    """Bytes of which no slice is shorter than asked for: a string at the end of a truncated file is an error."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice) and key.stop is not None and key.stop > len(self):
            raise IndexError("a string ends behind the end of the file")
        return super().__getitem__(key)


class Outside(Protocol):
    """The bytes of the file with the tensors, or as many of them as there are."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes: ...


def decode(data: bytes, external: Callable[[], Outside]) -> CheckpointFile:
    """Read a file's bytes.

    Args:
        data: of the file.
        external: returns the bytes of the file with the tensors, where there is one; called at most once.

    Raises:
        ValueError: not such a file, another version, or a damaged one.
    """
    if data[4:8] != IDENTIFIER:
        raise ValueError("not a checkpoint of ONNX Runtime's on-device training (identifier ODTC)")
    try:
        root = _table("Checkpoint").Checkpoint.GetRootAs(_Whole(data), 0)
        if root.Version() != VERSION:
            raise CheckpointError(f"version {root.Version()} of the format; expected {VERSION}")
        return _decoded(root, len(data), external)
    except (CheckpointError, FileNotFoundError):
        raise
    except Exception as error:
        raise DamagedFileError(f"truncated or damaged ({cause_of(error)})") from error


def _decoded(root: Any, size: int, external: Callable[[], Outside]) -> CheckpointFile:
    found = CheckpointFile({}, {})
    names = _Names()
    content = 0

    def tensors(table: Any, outside: Outside | None) -> Tensor:
        nonlocal content
        tensor = _tensor(table, outside)
        content += tensor.nbytes
        # entries may share their bytes, so that a small file would fill the memory
        check_growth(size, content, "what it holds")
        return tensor

    module, outside = root.ModuleState(), None
    if module is not None:
        found.nominal = bool(module.IsNominalState())
        outside = external() if module.HasExternalData() else None
        size += 0 if outside is None else len(outside)
        for target, length, at in (
            (found.trained, module.RequiresGradParamsLength(), module.RequiresGradParams),
            (found.frozen, module.FrozenParamsLength(), module.FrozenParams),
        ):
            for table in (at(i) for i in range(length)):
                name = names.new("tensor", _text(table.Name()))
                target[name] = torch.empty(0) if found.nominal else tensors(table, outside)
    for group in (root.OptimizerGroups(i) for i in range(root.OptimizerGroupsLength())):
        moments: dict[str, dict[str, Tensor]] = {}
        for state in (group.OptimizerStates(i) for i in range(group.OptimizerStatesLength())):
            tables = [state.Momentums(i) for i in range(state.MomentumsLength())]
            parameter = names.new("state of", _text(state.ParamName()))
            moments[parameter] = {_text(t.Name()): tensors(t, outside) for t in tables}
        found.groups[names.new("group", _text(group.GroupName()))] = Group(
            group.Step(), group.InitialLearningRate(), moments
        )
    bag = root.PropertyBag()
    if bag is not None:
        for kind in ("Ints", "Floats", "Strings"):
            at = getattr(bag, kind)
            for entry in (at(i) for i in range(getattr(bag, f"{kind}Length")())):
                value = entry.Value()
                found.properties[names.new("property", _text(entry.Name()))] = (
                    _text(value) if kind == "Strings" else value
                )
    return found


class _Names(set[tuple[str, str]]):
    """Names that have occurred; of two entries of one name one would be lost."""

    def new(self, kind: str, name: str) -> str:
        if (kind, name) in self:
            raise DamagedFileError(f"the {kind} {name!r} occurs twice")
        self.add((kind, name))
        return name


def _text(value: bytes | None) -> str:
    if value is None:
        raise IndexError("a name is missing")
    return value.decode()


def _tensor(table: Any, outside: Outside | None) -> Tensor:
    name, dtype = _text(table.Name()), TORCH.get(table.DataType())
    if dtype is None:
        raise ValueError(f"tensor {name!r} has element type {table.DataType()} of ONNX, which is not supported")
    shape = [table.Dims(i) for i in range(table.DimsLength())]
    if any(s < 0 for s in shape):
        raise IndexError(f"tensor {name!r} has shape {shape}")
    count = 1
    for s in shape:
        count *= s
    size, start = count * dtype.itemsize, table.ExternalDataOffset()
    if start < 0:
        raw = b"" if table.RawDataIsNone() else table.RawDataAsNumpy().tobytes()
    elif outside is None:
        raise IndexError(f"tensor {name!r} is said to be in another file")
    else:
        raw = outside[start : start + size]
    if len(raw) != size:
        raise IndexError(f"tensor {name!r} of shape {shape} has {len(raw)} bytes instead of {size}")
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


class _Writer:
    """Writes tables with a flatbuffers builder, and large tensors elsewhere."""

    def __init__(self, external: Callable[[memoryview], int] | None) -> None:
        self.builder = flatbuffers.Builder(1 << 16)
        self._external = external

    def table(self, name: str, fields: Mapping[str, Any]) -> int:
        """One table; ``fields`` are offsets and numbers, ``None`` for what is left out."""
        module = _table(name)
        module.Start(self.builder)
        for field, value in fields.items():
            if value is not None:
                getattr(module, f"Add{field}")(self.builder, value)
        return module.End(self.builder)

    def vector(self, table: str, field: str, entries: list[int]) -> int:
        """A vector of tables, for ``field`` of ``table``."""
        getattr(_table(table), f"Start{field}Vector")(self.builder, len(entries))
        for entry in reversed(entries):
            self.builder.PrependUOffsetTRelative(entry)
        return self.builder.EndVector()

    def tensor(self, name: str, tensor: Tensor | None, *, inline: bool) -> int:
        """One tensor, or its name alone."""
        text = self.builder.CreateString(name)
        if tensor is None:
            nothing = self.builder.CreateByteVector(b"")
            return self.table("Tensor", {"Name": text, "Dims": nothing, "DataType": 1, "RawData": nothing})
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        start = data = None
        if inline or self._external is None or len(raw) < _INLINE:
            data = self.builder.CreateByteVector(bytes(raw))
        else:
            start = self._external(raw)
        module = _table("Tensor")
        module.StartDimsVector(self.builder, tensor.dim())
        for size in reversed(tensor.shape):
            self.builder.PrependInt64(size)
        dims = self.builder.EndVector()
        fields = {"Name": text, "Dims": dims, "DataType": int(ONNX[tensor.dtype]), "RawData": data}
        return self.table("Tensor", fields | {"ExternalDataOffset": start})

    def group(self, name: str, group: Group) -> int:
        states = []
        for parameter, moments in group.moments.items():
            tensors = [self.tensor(n, t, inline=True) for n, t in moments.items()]
            text = self.builder.CreateString(parameter)
            vector = self.vector("ParameterOptimizerState", "Momentums", tensors)
            states.append(self.table("ParameterOptimizerState", {"ParamName": text, "Momentums": vector}))
        text, vector = self.builder.CreateString(name), self.vector("OptimizerGroup", "OptimizerStates", states)
        rate = group.learning_rate
        fields = {"GroupName": text, "Step": group.step, "InitialLearningRate": rate, "OptimizerStates": vector}
        return self.table("OptimizerGroup", fields)

    def properties(self, properties: Mapping[str, int | float | str]) -> int:
        found: dict[str, list[int]] = {"Ints": [], "Floats": [], "Strings": []}
        for name, value in properties.items():
            text, kind = self.builder.CreateString(name), _kind(value)
            entry = self.builder.CreateString(value) if isinstance(value, str) else value
            found[kind].append(self.table(f"{kind[:-1]}Property", {"Name": text, "Value": entry}))
        return self.table("PropertyBag", {kind: self.vector("PropertyBag", kind, e) for kind, e in found.items()})


def _kind(value: int | float | str) -> str:
    return "Strings" if isinstance(value, str) else "Ints" if isinstance(value, int) else "Floats"


def encode(contents: CheckpointFile, external: Callable[[memoryview], int] | None = None) -> bytes:
    """The bytes of a file.

    Args:
        contents: of the file.
        external: writes a parameter's bytes elsewhere and returns their offset there; by default all are in the file.
    """
    writer = _Writer(external)
    vectors = []
    for field, tensors in (("RequiresGradParams", contents.trained), ("FrozenParams", contents.frozen)):
        entries = [writer.tensor(n, None if contents.nominal else t, inline=False) for n, t in tensors.items()]
        vectors.append(writer.vector("ModuleState", field, entries))
    fields = {"RequiresGradParams": vectors[0], "FrozenParams": vectors[1]}
    flags = {"IsNominalState": contents.nominal, "HasExternalData": external is not None}
    module = writer.table("ModuleState", fields | flags)
    groups = writer.vector("Checkpoint", "OptimizerGroups", list(_groups(writer, contents)))
    bag = writer.properties(contents.properties) if contents.properties else None
    root = {"Version": VERSION, "ModuleState": module, "OptimizerGroups": groups, "PropertyBag": bag}
    writer.builder.Finish(writer.table("Checkpoint", root), file_identifier=IDENTIFIER)
    return bytes(writer.builder.Output())


def _groups(writer: _Writer, contents: CheckpointFile) -> Iterator[int]:
    for name, group in contents.groups.items():
        yield writer.group(name, group)
