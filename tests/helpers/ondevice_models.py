"""Artifacts and loops that the tests of on-device training share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from orttrainer_models import ADAM, Recording
from safetensors.numpy import load_file

from lightning_ort.checkpoints.state import OptimizerState
from lightning_ort.ondevice import CheckpointState, Module, Optimizer, OptimizerConfig
from lightning_ort.ondevice.formats import Artifacts, flavour_named


def config_of(recording: Recording) -> OptimizerConfig:
    """The optimizer of a recording."""
    config = recording.config()
    values: dict[str, Any] = {"lr": config.lr}
    if recording.settings["opt"] == "sgd":
        return OptimizerConfig("SGD", **values)
    values |= {"betas": (config.alpha, config.beta), "eps": config.epsilon, "weight_decay": config.lambda_coef}
    values["bias_correction"] = config.do_bias_correction
    if recording.name.startswith("FORMULA") and "clip" in recording.settings:
        values["clip_grad_norm"] = config.max_norm_clip
    if recording.settings["opt"] == "lamb":
        return OptimizerConfig("Lamb", ratio_min=config.ratio_min, ratio_max=config.ratio_max, **values)
    after = config.weight_decay_mode is ADAM.DecayMode.AFTER_WEIGHT_UPDATE
    return OptimizerConfig("AdamW", decay="after" if after else "before", **values)


def rewritten(artifacts: Artifacts, directory: Path, config: OptimizerConfig, flavour: str = "portable") -> Path:
    """The same artifacts with another optimizer."""
    old = artifacts.state
    state = dataclasses.replace(
        old, optimizer=OptimizerState.fresh(config, {n: old.parameters[n] for n in old.trained})
    )
    flavour_named(flavour).write(dataclasses.replace(artifacts, state=state, optimizer=config), directory, "")
    return directory


def opened(directory: Path) -> tuple[CheckpointState, Module, Optimizer]:
    """The classes of the on-device API on portable artifacts."""
    state = CheckpointState.load_checkpoint(directory / "checkpoint.safetensors")
    module = Module(directory / "train_step.onnx", state, directory / "eval_step.onnx")
    return state, module, Optimizer(directory / "train_step.onnx", module)


def train(module: Module, optimizer: Optimizer, data: list[tuple[Any, ...]]) -> list[float]:
    """Losses of one training step per batch."""
    losses = []
    module.train()
    for batch in data:
        outputs = module(*[x.numpy() for x in batch])
        losses.append(float(outputs[0] if isinstance(outputs, tuple) else outputs))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


def strangers_training(directory: Path, data: list[dict[str, np.ndarray]], lr: float) -> tuple[list[float], dict]:
    """Losses and the last tensors of a loop over ``train_step.onnx`` that knows nothing of this package."""
    session = onnxruntime.InferenceSession(directory / "train_step.onnx", providers=["CPUExecutionProvider"])
    tensors = load_file(directory / "checkpoint.safetensors")
    rate = np.array(lr, np.float32)
    wanted, given = [o.name for o in session.get_outputs()], {i.name for i in session.get_inputs()}
    losses = []
    for batch in data:
        feed = {n: t for n, t in tensors.items() if n in given}
        results = dict(zip(wanted, session.run(None, {**feed, **batch, "optimizer/learning_rate": rate}), strict=True))
        losses.append(float(results["loss"]))
        tensors |= {n.removeprefix("new/"): t for n, t in results.items() if n.startswith("new/")}
    return losses, tensors
