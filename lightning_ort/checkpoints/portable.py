"""Checkpoints in safetensors: each tensor under the name of the input of ``train_step.onnx`` that it belongs to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from lightning_ort.checkpoints.state import OptimizerState, TrainingState
from lightning_ort.errors import CheckpointError, DamagedFileError
from lightning_ort.files.reading import cause_of, consistent, refusing
from lightning_ort.files.safetensors_files import read_tensors, write_tensors
from lightning_ort.files.writing import write_file
from lightning_ort.optim.kinds import TORCH_STATES
from lightning_ort.runtime.tensors import ONNX
from lightning_ort.validation import listed

__all__ = [
    "DTYPES",
    "LEARNING_RATE",
    "NEW",
    "STEP",
    "dtype_name",
    "is_checkpoint",
    "load_checkpoint",
    "moment_name",
    "save_checkpoint",
]

_FORMAT, _VERSION = "lightning_ort.ondevice", 1


def is_checkpoint(path: Path) -> bool:
    """Whether the file begins as safetensors do: the length of a JSON text, and that text."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(9)
    return len(start) == 9 and start[8:] == b"{" and start[6:8] == b"\0\0"


def save_checkpoint(state: TrainingState, path: Path, *, include_optimizer_state: bool, nominal: bool = False) -> None:
    """Write a file that is complete when it appears.

    Args:
        state: all of it.
        path: of the file.
        include_optimizer_state: write moments and the number of updates, not only the learning rate.
        nominal: write the parameters' names, types and shapes instead of their values. Buffers are written, which
            ``copy_buffer_to_parameters`` brings with ``trainable_only=False`` only.
    """
    nominal = nominal or state.nominal
    tensors = dict(state.buffers if nominal else state.tensors)
    described: dict[str, Any] = {
        "version": _VERSION,
        "parameters": list(state.parameters),
        "trained": list(state.trained),
        "buffers": list(state.buffers),
        "properties": state.properties,
        "optimizer": None,
    }
    if nominal:
        forms = {n: {"dtype": dtype_name(t.dtype), "shape": list(t.shape)} for n, t in state.parameters.items()}
        described["nominal"] = forms
    optimizer = state.optimizer
    if optimizer is not None:
        described["optimizer"] = {"kind": optimizer.kind, "learning_rate": optimizer.learning_rate, "moments": {}}
        if include_optimizer_state:
            tensors[STEP] = torch.tensor(optimizer.step, dtype=torch.int64)
            for name, moments in optimizer.moments.items():
                described["optimizer"]["moments"][name] = list(moments)
                tensors |= {moment_name(s, name): t for s, t in moments.items()}
    with write_file(path, replace=True) as stream:
        write_tensors(stream, tensors, {"format": _FORMAT, _FORMAT: json.dumps(described)})


def load_checkpoint(path: Path) -> TrainingState:
    """Read what :func:`save_checkpoint` wrote; while it is replaced, the old or the new one.

    Raises:
        CheckpointError: it is damaged, or was written by something else.
    """

    name = repr(str(path))

    def read() -> TrainingState:
        with refusing(name, "no checkpoint, or a damaged one"):
            with open(path, "rb") as stream:
                tensors, metadata, wrong = read_tensors(stream)
            if _FORMAT not in metadata:
                raise CheckpointError(f"{name} holds tensors, but no training: it lacks the metadata {_FORMAT!r}.")
            described = json.loads(metadata[_FORMAT])
            try:
                state = _state(described, tensors)
            except Exception as error:
                raise CheckpointError(f"The checkpoint {name} does not fit together: {cause_of(error)}.") from error
            if wrong:
                raise DamagedFileError(f"the checksum of {listed(map(repr, wrong))} is wrong")
        return state

    return consistent([path], read)


def _state(described: dict[str, Any], tensors: dict[str, torch.Tensor]) -> TrainingState:
    if described["version"] != _VERSION:
        raise ValueError(f"it has version {described['version']!r}, expected {_VERSION}")
    rest = dict(tensors)
    nominal = described.get("nominal")
    for key in ("parameters", "trained", "buffers"):
        names = described[key]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"its {key} are no list of names")
        if len(set(names)) < len(names):
            raise ValueError(f"its {key} have a name twice")
    parameters = {
        name: rest.pop(name) if nominal is None else _zeros(nominal[name]) for name in described["parameters"]
    }
    buffers = {name: rest.pop(name) for name in described["buffers"]}
    trained = tuple(described["trained"])
    unknown = sorted(set(trained) - set(parameters))
    if unknown:
        raise ValueError(f"{unknown} are trained, but are no parameters")
    properties = dict(described["properties"])
    if any(isinstance(v, bool) or not isinstance(v, (int, float, str)) for v in properties.values()):
        raise ValueError("a property is no int, float or str")
    optimizer = None
    given = described["optimizer"]
    if given is not None:
        optimizer = OptimizerState(str(given["kind"]), float(given["learning_rate"]))
        if not math.isfinite(optimizer.learning_rate) or optimizer.learning_rate < 0:
            raise ValueError(f"its learning rate is {optimizer.learning_rate}")
        if STEP in rest:
            optimizer.step = _count(rest.pop(STEP))
        for name, states in given["moments"].items():
            unknown = sorted(set(states) - TORCH_STATES.keys())
            if unknown:
                raise ValueError(f"it has {unknown} of {name!r}; expected some of {', '.join(TORCH_STATES)}")
            optimizer.moments[name] = {s: rest.pop(moment_name(s, name)) for s in states}
            for state, tensor in optimizer.moments[name].items():
                if tensor.shape != parameters[name].shape or tensor.dtype != parameters[name].dtype:
                    raise ValueError(f"{state} of {name!r} is not shaped like the parameter")
    if rest:
        raise ValueError(f"it holds tensors that it does not describe: {sorted(rest)}")
    return TrainingState(parameters, trained, buffers, properties, optimizer, nominal=nominal is not None)


def _zeros(form: dict[str, Any]) -> torch.Tensor:
    """What stands for a parameter without values."""
    if any(type(size) is not int or size < 0 for size in form["shape"]):
        raise ValueError(f"{form['shape']} is no shape")
    # one number, until a graph of these shapes has been seen
    return torch.zeros((), dtype=DTYPES[form["dtype"]]).expand(form["shape"])


def _count(tensor: torch.Tensor) -> int:
    if tensor.numel() != 1 or tensor.dtype != torch.int64 or int(tensor) < 0:
        raise ValueError(f"{STEP!r} is {tensor.dtype} of shape {tuple(tensor.shape)}; expected one int64 from 0")
    return int(tensor)


LEARNING_RATE = "optimizer/learning_rate"
STEP = "optimizer/step"
NEW = "new/"
"""prefix of an output that is the next value of the input of that name"""


DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in ONNX}
"""name of each element type"""


def dtype_name(dtype: torch.dtype) -> str:
    """As numpy and the ONNX Runtime of JavaScript call it."""
    return str(dtype).removeprefix("torch.")


def moment_name(state: str, parameter: str) -> str:
    """Of one optimizer state of one parameter."""
    return f"optimizer/{state}/{parameter}"
