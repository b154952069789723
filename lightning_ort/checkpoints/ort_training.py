"""Checkpoint files of ONNX Runtime's on-device training as a :class:`TrainingState`, and back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from pathlib import Path

import torch

from lightning_ort.checkpoints.flatbuffer import IDENTIFIER, CheckpointFile, Group, decode, encode
from lightning_ort.checkpoints.state import OptimizerState, Property, TrainingState
from lightning_ort.errors import CheckpointError, DamagedFileError
from lightning_ort.files.checksums import is_intact, seal
from lightning_ort.files.reading import cause_of, consistent
from lightning_ort.files.writing import write_file, write_path
from lightning_ort.optim.kinds import ORT_TRAINING_STATES

__all__ = ["is_checkpoint", "read_checkpoint", "write_checkpoint"]

# Flatbuffers end at 2 GB. Beside a checkpoint larger than this lies a file with its parameters.
_EXTERNAL = 1_800_000_000
_GROUP = "group0"
_MOMENTS = tuple(ORT_TRAINING_STATES.values())

# Properties by which what the format has no place for survives a training with ONNX Runtime's own classes.
_KIND = "lightning_ort.optimizer"
_BUFFERS = "lightning_ort.buffers"
_SAVE = "lightning_ort.save"
_RESERVED = (_KIND, _BUFFERS, _SAVE)

# A file of parameters of ours ends with this and the mark of its save: the two files of a checkpoint take the places of
# old ones one after the other, and a process may die in between.
_MARK = b"lightning_ort:"
_MARK_DIGITS = 32
_MARK_PATTERN = re.compile(rb"lightning_ort:([0-9a-f]{32})")
_TAIL = 256
"""Bytes at the end of such a file within which the mark is, before the checksum."""


def is_checkpoint(path: Path) -> bool:
    """Whether a file begins like a checkpoint."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(8)[4:] == IDENTIFIER


def read_checkpoint(path: Path) -> TrainingState:
    """Read a file that ONNX Runtime's training API or :func:`write_checkpoint` has written.

    Frozen parameters are those that are not trained; which of them are buffers is known of files of
    :func:`write_checkpoint` only. A file from elsewhere does not say which optimizer it belongs to: with two moments
    it is taken for AdamW, with one for SGD.

    While the files are replaced, what is read is all of the old or all of the new ones.

    Raises:
        FileNotFoundError: no such file, or not the one with its tensors.
        CheckpointError: another format, truncated, damaged, or two files of two saves.
    """

    name = f"Checkpoint {str(path)!r}"

    def read() -> TrainingState:
        try:
            with open(path, "rb") as stream, contextlib.ExitStack() as opened:
                if not is_intact(stream):
                    raise DamagedFileError("truncated or damaged (its checksum is wrong)")
                data = stream.read()
                outside: list[_Outside] = []

                def external() -> _Outside:
                    outside.append(opened.enter_context(_Outside(_beside(path))))
                    return outside[0]

                found = decode(data, external)
                mark = outside[0].mark if outside else None
                if mark is not None and found.properties.get(_SAVE) != mark:
                    raise DamagedFileError(
                        f"it is of another save than the parameters in {_beside(path).name!r}, perhaps because a "
                        "process died while it was saving; use an older checkpoint"
                    )
                return _state(found)
        except FileNotFoundError:
            raise
        except Exception as error:
            kind = type(error) if isinstance(error, CheckpointError) else DamagedFileError
            raise kind(f"{name}: {cause_of(error)}.") from error

    if not path.is_file():
        raise FileNotFoundError(f"There is no checkpoint file {str(path)!r}.")
    beside = _beside(path)
    return consistent([path, beside] if beside.exists() else [path], read)


class _Outside:
    """The bytes of the file with the parameters, read from one handle.

    They are not mapped into memory: a program that cuts the file short would end this one.

    Attributes:
        mark: of the save that wrote it, ``None`` if another program did.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"The tensors of the checkpoint are missing: there is no {str(path)!r}.")
        self._stream = open(path, "rb")  # noqa: SIM115  (closed by __exit__)
        self.size = self._stream.seek(0, os.SEEK_END)
        self._stream.seek(max(self.size - _TAIL, 0))
        found = _MARK_PATTERN.search(self._stream.read())
        self.mark = None if found is None else found[1].decode()
        if not is_intact(self._stream):
            self._stream.close()
            raise DamagedFileError(f"the checksum of {path.name!r} is wrong")

    def __enter__(self) -> _Outside:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> bytes:
        self._stream.seek(part.start)
        return self._stream.read(max(min(part.stop, self.size) - part.start, 0))


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


def _state(found: CheckpointFile) -> TrainingState:
    own = {name: found.properties.pop(name) for name in _RESERVED if name in found.properties}
    dtypes = _buffer_types(own.get(_BUFFERS, "{}"), found)
    buffers = {name: found.frozen.pop(name).to(dtype) for name, dtype in dtypes.items()}
    parameters = found.trained | found.frozen
    optimizer = None
    if _GROUP in found.groups:
        optimizer = _optimizer(found.groups[_GROUP], str(own.get(_KIND, "")), found)
    return TrainingState(parameters, tuple(found.trained), buffers, found.properties, optimizer, nominal=found.nominal)


def _buffer_types(text: Property, found: CheckpointFile) -> dict[str, torch.dtype]:
    try:
        names = dict(json.loads(str(text)))
        types = {str(name): getattr(torch, str(dtype)) for name, dtype in names.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"property {_BUFFERS!r} is {str(text)[:100]!r}, which does not list buffers") from error
    unknown = [name for name, dtype in types.items() if name not in found.frozen or not isinstance(dtype, torch.dtype)]
    if unknown:
        raise ValueError(f"property {_BUFFERS!r} names {', '.join(unknown)}, which are not in the file")
    return types


def _optimizer(group: Group, kind: str, found: CheckpointFile) -> OptimizerState:
    foreign = sorted(set(group.moments) - set(found.trained))
    if foreign:
        raise ValueError(f"the optimizer has moments of {', '.join(foreign)}, which are not trained")
    two = any(_MOMENTS[1] in moments for moments in group.moments.values())
    state = OptimizerState(kind or ("AdamW" if two or not group.moments else "SGD"), group.learning_rate, group.step)
    names = tuple(ORT_TRAINING_STATES) if state.kind != "SGD" else ("momentum",) if two else ()
    for parameter, moments in group.moments.items():
        for moment, tensor in moments.items():
            if moment not in _MOMENTS or tensor.shape != found.trained[parameter].shape:
                raise ValueError(
                    f"moment {moment!r} of {parameter!r} has shape {list(tensor.shape)}; expected "
                    f"{' or '.join(_MOMENTS)} of shape {list(found.trained[parameter].shape)}"
                )
        state.moments[parameter] = {name: moments[key] for name, key in zip(names, _MOMENTS, strict=False)}
    return state


def write_checkpoint(
    state: TrainingState, path: Path, *, include_optimizer_state: bool, nominal: bool = False
) -> list[Path]:
    """Write a file that ONNX Runtime's training API reads; parameters of more than 1.8 GB go to ``<path>.data``.

    Buffers that count become float32, exact up to 16 million. The learning rate stands where the format has the
    initial one.

    Args:
        state: all of it.
        path: of the file; it is complete when it appears.
        include_optimizer_state: write moments and step, not only the learning rate.
        nominal: write names without values.

    Returns:
        The files.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: moments are missing or too large for the format.
    """
    trained = {name: state.parameters[name] for name in state.trained}
    frozen = {name: t for name, t in state.parameters.items() if name not in trained}
    frozen |= {name: t if t.is_floating_point() else t.float() for name, t in state.buffers.items()}
    contents = CheckpointFile(trained, frozen, nominal or state.nominal, {}, dict(state.properties))
    reserved = [name for name in state.properties if name in _RESERVED]
    if reserved:
        raise ValueError(f"Properties {', '.join(reserved)} are used by the format; give yours other names.")
    if state.buffers:
        types = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in state.buffers.items()}
        contents.properties[_BUFFERS] = json.dumps(types)
    if state.optimizer is not None:
        contents.properties[_KIND] = state.optimizer.kind
        contents.groups[_GROUP] = _group(state, with_moments=include_optimizer_state)
    size = 0 if contents.nominal else sum(t.nbytes for t in [*trained.values(), *frozen.values()])
    moments = sum(t.nbytes for m in contents.groups.values() for p in m.moments.values() for t in p.values())
    if moments > _EXTERNAL:
        raise ValueError(f"The moments are {moments} bytes; checkpoints of ONNX Runtime hold at most {_EXTERNAL}.")
    if size + moments <= _EXTERNAL:
        _replace(path, encode(contents))
        return [path]
    mark = secrets.token_hex(_MARK_DIGITS // 2)
    contents.properties[_SAVE] = mark
    # both get their names when both are complete, one just after the other
    with write_path(path) as temporary:
        with open(_beside(temporary), "w+b") as file:

            def external(raw: memoryview) -> int:
                file.write(bytes(-file.tell() % 8))
                start = file.tell()
                file.write(raw)
                return start

            data = encode(contents, external)
            file.write(_MARK + mark.encode())
            seal(file)
        with open(temporary, "w+b") as file:
            file.write(data)
            seal(file)
    return [path, _beside(path)]


def _group(state: TrainingState, *, with_moments: bool) -> Group:
    optimizer = state.optimizer
    assert optimizer is not None
    group = Group(optimizer.step if with_moments else 0, optimizer.learning_rate, {})
    if not with_moments or not optimizer.step:
        return group
    for name in state.trained:
        own = list(optimizer.moments.get(name, {}).values())
        if optimizer.kind == "SGD":
            # momentum is computed by AdamWOptimizer, which has two
            own = [own[0], torch.zeros_like(own[0])] if own else [torch.zeros_like(state.parameters[name])]
        elif len(own) != len(_MOMENTS):
            raise ValueError(f"The optimizer state lacks moments of {name!r}.")
        group.moments[name] = dict(zip(_MOMENTS, own, strict=False))
    return group


def _replace(path: Path, data: bytes) -> None:
    with write_file(path, replace=True) as file:
        file.write(data)
        seal(file)
