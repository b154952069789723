"""``lightning_ort.artifacts``, which a script for ``onnxruntime.training.artifacts`` imports in its place."""

import importlib
import inspect
import warnings

import numpy as np
import onnx
import pytest
import torch
from ondevice_wheel import needs_wheel
from torch import nn

from lightning_ort import artifacts
from lightning_ort.ondevice import CheckpointState, Module, Optimizer

WEIGHTS = ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.fixture
def forward(tmp_path):
    network = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    x = torch.randn(4, 6)
    path = tmp_path / "forward.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network, (x,), path, input_names=["x"], output_names=["y"], dynamic_axes={"x": [0], "y": [0]},
            dynamo=False, do_constant_folding=False, training=torch.onnx.TrainingMode.TRAINING,
        )  # fmt: skip
    return path


def script(package, forward, folder):
    """As it was written for the original: arguments by position, files by the names that these have."""
    folder.mkdir()
    package.generate_artifacts(
        str(forward), WEIGHTS[:2], WEIGHTS[2:3], package.LossType.CrossEntropyLoss, package.OptimType.SGD, folder,
        additional_output_names=["y"],
    )  # fmt: skip
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    random, losses = np.random.default_rng(0), []
    for _ in range(5):
        loss, y = module(random.standard_normal((7, 6)).astype(np.float32), random.integers(0, 3, 7))
        assert y.shape == (7, 3)
        losses.append(float(loss))
        optimizer.step()
        module.lazy_reset_grad()
    return losses, {name: p.data.copy() for name, p in state.parameters}, module.input_names()


def test_parameters_that_are_listed_are_in_the_checkpoint(forward, tmp_path):
    before = {i.name: onnx.numpy_helper.to_array(i) for i in onnx.load(forward).graph.initializer}
    _, after, _ = script(artifacts, forward, tmp_path / "ours")
    # the last bias is neither trained nor frozen, and stays a constant of the graphs
    assert list(after) == WEIGHTS[:3]
    assert [n for n in after if not np.array_equal(before[n], after[n])] == WEIGHTS[:2]


@needs_wheel
def test_a_script_of_the_original(forward, tmp_path):
    theirs = importlib.import_module("onnxruntime.training.artifacts")
    losses, weights, inputs = script(artifacts, forward, tmp_path / "ours")
    expected, weights_expected, inputs_expected = script(theirs, forward, tmp_path / "theirs")
    np.testing.assert_allclose(losses, expected, rtol=0, atol=2e-6)
    assert weights.keys() == weights_expected.keys() and inputs == inputs_expected
    for name, weight in weights.items():
        np.testing.assert_allclose(weight, weights_expected[name], rtol=0, atol=2e-6, err_msg=name)
    # the types of arguments differ, and nothing else
    arguments = [
        (p.name, p.default, p.kind) for p in inspect.signature(artifacts.generate_artifacts).parameters.values()
    ]
    original = inspect.signature(theirs.generate_artifacts).parameters.values()
    assert arguments == [(p.name, p.default, p.kind) for p in original]


def test_without_names_nothing_is_trained(forward, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    artifacts.generate_artifacts(str(forward), loss=artifacts.LossType.MSELoss, prefix="p_")
    assert {p.name for p in tmp_path.glob("p_*")} == {"p_training_model.onnx", "p_eval_model.onnx", "p_checkpoint"}
    state = CheckpointState.load_checkpoint(tmp_path / "p_checkpoint")
    assert not list(state.parameters)
    module = Module(tmp_path / "p_training_model.onnx", state, tmp_path / "p_eval_model.onnx")
    assert np.isfinite(module(np.ones((2, 6), np.float32), np.ones((2, 3), np.float32)))
