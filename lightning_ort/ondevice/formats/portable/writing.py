"""Writes the portable files."""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from pathlib import Path
from typing import Any

import onnx_ir as ir

from lightning_ort._version import __version__
from lightning_ort.checkpoints.portable import LEARNING_RATE, NEW, STEP, dtype_name, moment_name, save_checkpoint
from lightning_ort.compiler.aot.joint import GRAD
from lightning_ort.files.onnx_models import save_onnx
from lightning_ort.files.writing import write_file
from lightning_ort.ondevice.formats import Artifacts
from lightning_ort.ondevice.formats.portable.manifest import FORMAT, SUFFIX, VERSION
from lightning_ort.ondevice.formats.portable.train_step import gradients_model, train_step_model, update_model
from lightning_ort.ondevice.names import check_names
from lightning_ort.ondevice.optimizer_config import OptimizerConfig
from lightning_ort.runtime.tensors import TORCH

__all__ = ["write_artifacts"]

_UPDATE = ("optimizer/", "apply_update/")
"""beginnings of names in an update: of its numbers and moments, and of values inside"""

_RANDOMNESS = (
    "Dropout and other random operators of train_step and gradients draw inside the graph (RandomUniformLike and its "
    "kin), other numbers at each run; nothing is fed for them. eval_step and infer draw nothing."
)


def write_artifacts(
    artifacts: Artifacts, directory: Path, prefix: str, *, nominal_checkpoint: bool = False
) -> list[Path]:
    """Write all files, the manifest last; the paths.

    Raises:
        ValueError: a tensor has a name that means something else in them; nothing has been written then.
    """
    _check_names(artifacts)
    state, config = artifacts.state, artifacts.optimizer
    models: dict[str, ir.Model] = {"gradients": gradients_model(artifacts.train)}
    settings = None if config is None else _settings(config)
    if config is not None:
        models["train_step"] = train_step_model(artifacts.train, state, config)
        models["update"] = update_model(state, config)
        models["train_step"].metadata_props[FORMAT] = json.dumps(settings, sort_keys=True)
    models["eval_step"] = artifacts.evaluation.model
    if artifacts.inference is not None:
        models["infer"] = artifacts.inference.model
    describe = _Describe(artifacts)
    described = {}
    for kind, model in models.items():
        described[kind] = describe(kind, model, f"{prefix}{kind}.onnx")
    content = {
        "format": FORMAT,
        "version": VERSION,
        "producer": f"lightning_ort {__version__}",
        "checkpoint": f"{prefix}checkpoint.safetensors",
        "next": f"An output called '{NEW}<input>' is to be fed to <input> in the next run; before the first run, "
        "inputs of the roles parameter, buffer, moment and step are the tensors of their names in the checkpoint.",
        "randomness": _RANDOMNESS,
        "parameters": [
            {"name": n, "dtype": dtype_name(t.dtype), "shape": list(t.shape), "trained": n in state.trained}
            for n, t in state.parameters.items()
        ],
        "buffers": [
            {"name": n, "dtype": dtype_name(t.dtype), "shape": list(t.shape)} for n, t in state.buffers.items()
        ],
        "optimizer": settings,
        "graphs": described,
    }
    paths = [directory / f"{prefix}checkpoint.safetensors"]
    save_checkpoint(state, paths[-1], include_optimizer_state=True)
    if nominal_checkpoint:
        paths.append(directory / f"{prefix}nominal_checkpoint.safetensors")
        save_checkpoint(state, paths[-1], include_optimizer_state=False, nominal=True)
    for kind, model in models.items():
        paths.append(directory / f"{prefix}{kind}.onnx")
        described[kind]["crc32"] = save_onnx(model, paths[-1], check=lambda file: zlib.crc32(file.read_bytes()))
    paths.append(directory / f"{prefix}{SUFFIX}")
    with write_file(paths[-1], replace=True) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())
    return paths


def _check_names(artifacts: Artifacts) -> None:
    state, updates = artifacts.state, artifacts.optimizer is not None

    def meaning(name: str) -> str | None:
        fed = name.removeprefix(NEW)
        if updates and fed.startswith(_UPDATE):
            return f"the numbers and moments of the optimizer ({_UPDATE[0]!r})"
        return f"the next value of {fed!r}" if fed != name and fed.removesuffix("/shape") in state.tensors else None

    inference = artifacts.inference
    check_names(
        meaning,
        inputs=[i.name for i in artifacts.train.inputs],
        results=dict.fromkeys([*artifacts.train.outputs, *(inference.outputs if inference is not None else ())]),
        parameters=state.parameters,
        buffers=state.buffers,
    )


def _settings(config: OptimizerConfig) -> dict[str, Any]:
    """What differs from the defaults, and what every optimizer has; JSON knows no infinite numbers."""
    values = {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if f.name in ("kind", "lr") or getattr(config, f.name) != f.default
    }
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    return {k: str(v) if isinstance(v, float) and math.isinf(v) else v for k, v in values.items()}


class _Describe:
    """Says what the inputs and outputs of the graphs are."""

    def __init__(self, artifacts: Artifacts) -> None:
        state = artifacts.state
        self._roles: dict[str, dict[str, Any]] = {n: {"role": "parameter"} for n in state.parameters}
        self._roles |= {n: {"role": "buffer"} for n in state.buffers}
        self._roles |= {STEP: {"role": "step"}, LEARNING_RATE: {"role": "learning_rate"}}
        self._roles |= {f"{n}{GRAD}": {"role": "gradient", "of": n} for n in state.trained}
        for name in state.trained:
            for s in artifacts.optimizer.states if artifacts.optimizer is not None else ():
                self._roles[moment_name(s, name)] = {"role": "moment", "of": name, "state": s}
        self._results = {"infer": ("output", "output")}

    def __call__(self, kind: str, model: ir.Model, file: str) -> dict[str, Any]:
        inputs = [
            {"name": v.name, **self._roles.get(str(v.name), {"role": "input"}), **_form(v)} for v in model.graph.inputs
        ]
        outputs = []
        first, other = self._results.get(kind, ("loss", "output"))
        for number, value in enumerate(model.graph.outputs):
            name = str(value.name)
            if name.startswith(NEW) and name.removeprefix(NEW) in self._roles:
                fed = name.removeprefix(NEW)
                role = {"role": self._roles[fed]["role"], "feeds": fed}
            else:
                role = self._roles.get(name, {"role": other if number else first})
            outputs.append({"name": name, **role, **_form(value)})
        return {"file": file, "inputs": inputs, "outputs": outputs}


def _form(value: ir.Value) -> dict[str, Any]:
    assert value.dtype is not None and value.shape is not None
    return {
        "dtype": dtype_name(TORCH[value.dtype]),
        "shape": [s if isinstance(s, int) else s.value for s in value.shape],
    }
