"""``optimizer_model.onnx``: executed by ONNX Runtime's training API against torch, and read back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from ondevice_wheel import DATA, WheelTraining, needs_wheel
from onnx import helper
from torch import Tensor

from lightning_ort import UnsupportedError
from lightning_ort.checkpoints.ort_training import read_checkpoint, write_checkpoint
from lightning_ort.checkpoints.state import OptimizerState, TrainingState
from lightning_ort.ondevice.formats.ort_training.names import METADATA
from lightning_ort.ondevice.formats.ort_training.optimizer import optimizer_model, read_optimizer
from lightning_ort.ondevice.optimizer_config import OptimizerConfig

TRAINING = """<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
step (float[3] x, float[3] w, float[2] u, float[3] "w_grad.accumulation.buffer", float[2] "u_grad.accumulation.buffer",
      bool[1] lazy_reset_grad)
  => (float loss, bool[1] "w_grad.accumulation.out", bool[1] "u_grad.accumulation.out")
<float[2] zero = {0, 0}>
{
  y = Mul(x, w)
  loss = ReduceSum<keepdims = 0>(y)
  "w_grad.accumulation.out" = com.microsoft.InPlaceAccumulatorV2("w_grad.accumulation.buffer", x, lazy_reset_grad)
  "u_grad.accumulation.out" = com.microsoft.InPlaceAccumulatorV2("u_grad.accumulation.buffer", zero, lazy_reset_grad)
}"""
"""The gradient of w is x, that of u is zero."""


class LAMB(torch.optim.Optimizer):
    """You et al. (2020), with a clamped ratio."""

    def __init__(self, params, config: OptimizerConfig) -> None:
        super().__init__(params, {})
        self.config = config

    @torch.no_grad()
    def step(self):
        c = self.config
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            t = state["t"] = state.get("t", 0) + 1
            state["m"] = c.betas[0] * state.get("m", 0) + (1 - c.betas[0]) * p.grad
            state["v"] = c.betas[1] * state.get("v", 0) + (1 - c.betas[1]) * p.grad**2
            first, second = (1 - b**t if c.bias_correction else 1.0 for b in c.betas)
            direction = (state["m"] / first) / ((state["v"] / second).sqrt() + c.eps) + c.weight_decay * p
            length, reach = p.norm(), direction.norm()
            ratio = (length / reach).clamp(c.ratio_min, c.ratio_max) if length > 0 and reach > 0 else 1.0
            p -= c.lr * ratio * direction


def torch_optimizer(config: OptimizerConfig, params: list[Tensor]) -> torch.optim.Optimizer:
    common = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.kind == "SGD":
        return torch.optim.SGD(params, **common, momentum=config.momentum, nesterov=config.nesterov)
    if config.kind == "Lamb":
        return LAMB(params, config)
    return getattr(torch.optim, config.kind)(params, **common, betas=config.betas, eps=config.eps)


CONFIGS = {
    "adamw": OptimizerConfig("AdamW", lr=0.1, weight_decay=0.1, eps=1e-3),
    "adamw clipped": OptimizerConfig("AdamW", lr=0.1, betas=(0.8, 0.95), clip_grad_norm=0.5),
    "adam": OptimizerConfig("Adam", lr=0.1),
    "adam with decay": OptimizerConfig("Adam", lr=0.1, weight_decay=0.1),
    "sgd": OptimizerConfig("SGD", lr=0.1),
    "sgd with decay, clipped": OptimizerConfig("SGD", lr=0.1, weight_decay=0.1, clip_grad_norm=1.0),
    "momentum": OptimizerConfig("SGD", lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": OptimizerConfig("SGD", lr=0.1, momentum=0.9, nesterov=True),
    "lamb": OptimizerConfig("Lamb", lr=0.1, weight_decay=0.1),
    "lamb, bounded": OptimizerConfig("Lamb", lr=0.1, bias_correction=False, ratio_min=0.6, ratio_max=0.7),
}
START = {"w": torch.tensor([1.0, -2.0, 3.0]), "u": torch.tensor([0.5, -1.5])}


def write(config: OptimizerConfig, folder: Path) -> None:
    onnx.save(onnx.parser.parse_model(TRAINING), folder / "training_model.onnx")
    ir.save(optimizer_model(config, 2), folder / "optimizer_model.onnx")
    state = TrainingState(dict(START), ("w", "u"), optimizer=OptimizerState(config.kind, config.lr))
    write_checkpoint(state, folder / "checkpoint", include_optimizer_state=True)


@needs_wheel
@pytest.mark.parametrize("name", CONFIGS)
def test_onnx_runtime_updates_like_torch(name, tmp_path):
    config = CONFIGS[name]
    write(config, tmp_path)
    training = WheelTraining(tmp_path)
    training.optimizer.set_learning_rate(config.lr)
    params = {n: p.clone().requires_grad_() for n, p in START.items()}
    optimizer = torch_optimizer(config, list(params.values()))
    for k in range(6):
        x = np.array([1.0, -0.5, 2.0], dtype=np.float32) * (k - 2.5)
        training.step(x)
        params["w"].grad, params["u"].grad = torch.tensor(x), torch.zeros(2)
        if config.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(params.values()), config.clip_grad_norm)
        optimizer.step()
        for n, value in training.data().items():
            np.testing.assert_allclose(value, params[n].detach().numpy(), rtol=0, atol=4e-6, err_msg=f"{n}, step {k}")
    training.save(tmp_path / "after")
    found = read_checkpoint(tmp_path / "after").optimizer
    assert found is not None and (found.kind, found.step) == (config.kind, 6)
    names = {"moment_1": ("exp_avg", "m"), "moment_2": ("exp_avg_sq", "v"), "momentum": ("momentum_buffer",)}
    assert tuple(found.moments["w"]) == config.states
    for n, moments in found.moments.items():
        for moment, tensor in moments.items():
            (expected,) = [optimizer.state[params[n]][k] for k in names[moment] if k in optimizer.state[params[n]]]
            torch.testing.assert_close(tensor, expected, rtol=0, atol=4e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_files_of_this_package_are_read_back(name, tmp_path):
    write(CONFIGS[name], tmp_path)
    path = tmp_path / "optimizer_model.onnx"
    assert read_optimizer(path, 2) == CONFIGS[name]


def test_edited_and_other_files_are_refused(tmp_path):
    config = CONFIGS["adam with decay"]
    write(config, tmp_path)
    path = tmp_path / "optimizer_model.onnx"
    with pytest.raises(ValueError, match="does not compute what its settings say for 3 trained parameters"):
        read_optimizer(path, 3)
    model = onnx.load(path)
    (settings,) = [p for p in model.metadata_props if p.key == METADATA]
    settings.value = json.dumps(dataclasses.asdict(config) | {"weight_decay": 0.2})
    onnx.save(model, path)
    with pytest.raises(ValueError, match="does not compute what its settings say"):
        read_optimizer(path, 2)
    settings.value = '{"kind": "RMSprop"}'
    onnx.save(model, path)
    with pytest.raises(ValueError, match=r"are no optimizer's \(The optimizer is 'RMSprop'"):
        read_optimizer(path, 2)
    with pytest.raises(UnsupportedError, match=r"training_model.onnx': node '.*' \(Mul\) is not supported"):
        read_optimizer(tmp_path / "training_model.onnx", 2)
    y = helper.make_tensor("y", 1, [1], [0.0])
    empty = helper.make_model(helper.make_graph([], "g", [], [helper.make_tensor_value_info("y", 1, [1])], [y]))
    onnx.save(empty, path)
    with pytest.raises(ValueError, match="it has 0 optimizers, expected one"):
        read_optimizer(path, 2)
    path.write_bytes(b"no model")
    with pytest.raises(ValueError, match="no ONNX model, or a damaged one"):
        read_optimizer(path, 2)
    with pytest.raises(FileNotFoundError, match="There is no ONNX file"):
        read_optimizer(tmp_path / "none.onnx", 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            OptimizerConfig("AdamW", weight_decay=0.1, bias_correction=False),
            "no weight decay before the update without",
        ),
        (OptimizerConfig("SGD", momentum=1.0), "momentum=1.0: .* below 1"),
    ],
    ids=["no bias correction", "momentum of one"],
)
def test_what_the_operators_cannot_do_is_refused(config, message):
    with pytest.raises(UnsupportedError, match=message):
        optimizer_model(config, 2)
    with pytest.raises(UnsupportedError, match="no trained parameter"):
        optimizer_model(OptimizerConfig(), 0)


def test_files_of_onnx_runtime():
    clipped = read_optimizer(DATA / "wheel_mlp" / "optimizer_model.onnx", 5)
    assert clipped == OptimizerConfig("AdamW", eps=1e-6, weight_decay=0.05, decay="after", clip_grad_norm=0.5)
    assert read_optimizer(DATA / "wheel_cnn" / "optimizer_model.onnx", 8) == OptimizerConfig("SGD")
    plain = OptimizerConfig("AdamW", eps=1e-6, decay="after")
    assert read_optimizer(DATA / "wheel_transformer" / "optimizer_model.onnx", 13) == plain
