"""Checkpoint files of ONNX Runtime's on-device training as a :class:`TrainingState`, and back."""

from __future__ import annotations

import json
import mmap
import os
import secrets
from pathlib import Path

import torch

from lightning_ort.files.writing import write_file
from lightning_ort.ondevice.ort_training.flatbuffer import IDENTIFIER, CheckpointFile, Group, decode, encode
from lightning_ort.ondevice.state import OptimizerState, Property, TrainingState

__all__ = ["is_checkpoint", "read_checkpoint", "write_checkpoint"]

# Flatbuffers end at 2 GB. Beside a checkpoint larger than this lies a file with its parameters.
_EXTERNAL = 1_800_000_000
_GROUP = "group0"
_MOMENTS = ("momentum0", "momentum1")

# Properties by which what the format has no place for survives a training with ONNX Runtime's own classes.
_KIND = "lightning_ort.optimizer"
_BUFFERS = "lightning_ort.buffers"
_SAVE = "lightning_ort.save"
_RESERVED = (_KIND, _BUFFERS, _SAVE)

# A file of parameters of ours ends with this and the mark of its save: the two files of a checkpoint take the places of
# old ones one after the other, and a process may die in between.
_MARK = b"lightning_ort:"
_MARK_DIGITS = 32


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

    Raises:
        FileNotFoundError: no such file, or not the one with its tensors.
        ValueError: another format, or truncated.
    """

    mark: list[str] = []

    def external() -> bytes | memoryview:
        beside = _beside(path)
        if not beside.is_file():
            raise FileNotFoundError(
                f"The tensors of checkpoint {str(path)!r} are missing: there is no {str(beside)!r}."
            )
        with beside.open("rb") as file:
            if not os.stat(beside).st_size:
                return b""
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        end = bytes(content[-len(_MARK) - _MARK_DIGITS :])
        if end.startswith(_MARK):
            mark.append(end.removeprefix(_MARK).decode("ascii", "replace"))
        return content

    if not path.is_file():
        raise FileNotFoundError(f"There is no checkpoint file {str(path)!r}.")
    try:
        found = decode(path.read_bytes(), external)
        if mark and found.properties.get(_SAVE) != mark[0]:
            raise ValueError(
                f"it is of another save than the parameters in {_beside(path).name!r}, perhaps because a process died "
                "while it was saving; use an older checkpoint"
            )
        return _state(found)
    except ValueError as error:
        raise ValueError(f"Checkpoint {str(path)!r}: {error}.") from error


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
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"property {_BUFFERS!r} is {text!r}, which does not list buffers") from error
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
    names = ("moment_1", "moment_2") if state.kind != "SGD" else ("momentum",) if two else ()
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
    with write_file(_beside(path), replace=True) as file:

        def external(raw: memoryview) -> int:
            file.write(bytes(-file.tell() % 8))
            start = file.tell()
            file.write(raw)
            return start

        data = encode(contents, external)
        file.write(_MARK + mark.encode())
    _replace(path, data)
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
