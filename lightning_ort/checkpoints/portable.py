"""Checkpoints in safetensors: each tensor under the name of the input of ``train_step.onnx`` that it belongs to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lightning_ort.files.writing import write_path
from lightning_ort.ondevice.portable.names import DTYPES, STEP, dtype_name, moment_name
from lightning_ort.ondevice.state import OptimizerState, TrainingState

__all__ = ["is_checkpoint", "load_checkpoint", "save_checkpoint"]

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
            ``copy_buffer_to_parameters`` does not bring.
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
    # views of one piece of memory would be refused
    copies = {n: t.detach().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    with write_path(path) as temporary:
        save_file(copies, temporary, metadata={"format": _FORMAT, _FORMAT: json.dumps(described)})


def load_checkpoint(path: Path) -> TrainingState:
    """Read what :func:`save_checkpoint` wrote.

    Raises:
        ValueError: it is damaged, or was written by something else.
    """
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_FORMAT)
            # clones, so that the file may be written again while the tensors live
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} is no checkpoint, or a damaged one ({error}).") from error
    if text is None:
        raise ValueError(f"{str(path)!r} holds tensors, but no training: it lacks the metadata {_FORMAT!r}.")
    try:
        return _state(json.loads(text), tensors)
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ValueError(f"The checkpoint {str(path)!r} does not fit together: {error}.") from error


def _state(described: dict[str, Any], tensors: dict[str, torch.Tensor]) -> TrainingState:
    if described["version"] != _VERSION:
        raise ValueError(f"it has version {described['version']!r}, expected {_VERSION}")
    rest = dict(tensors)
    nominal = described.get("nominal")
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
        if STEP in rest:
            optimizer.step = _count(rest.pop(STEP))
        for name, states in given["moments"].items():
            optimizer.moments[name] = {s: rest.pop(moment_name(s, name)) for s in states}
            for state, tensor in optimizer.moments[name].items():
                if tensor.shape != parameters[name].shape or tensor.dtype != parameters[name].dtype:
                    raise ValueError(f"{state} of {name!r} is not shaped like the parameter")
    if rest:
        raise ValueError(f"it holds tensors that it does not describe: {sorted(rest)}")
    return TrainingState(parameters, trained, buffers, properties, optimizer, nominal=nominal is not None)


def _zeros(form: dict[str, Any]) -> torch.Tensor:
    """What stands for a parameter without values."""
    if any(not isinstance(size, int) or size < 0 for size in form["shape"]):
        raise ValueError(f"{form['shape']} is no shape")
    return torch.zeros(form["shape"], dtype=DTYPES[form["dtype"]])


def _count(tensor: torch.Tensor) -> int:
    if tensor.numel() != 1 or tensor.dtype != torch.int64 or int(tensor) < 0:
        raise ValueError(f"{STEP!r} is {tensor.dtype} of shape {tuple(tensor.shape)}; expected one int64 from 0")
    return int(tensor)
