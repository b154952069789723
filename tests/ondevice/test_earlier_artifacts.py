"""``lightning_ort.artifacts``, which a script for ``onnxruntime.training.artifacts`` imports in its place."""

import importlib
import inspect
import warnings
from enum import Enum

import numpy as np
import onnx
import pytest
import torch
from ondevice_wheel import needs_wheel
from torch import nn

from lightning_ort import artifacts
from lightning_ort.ondevice import CheckpointState, Module, Optimizer, OptimizerConfig, generate_artifacts

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


def script(package, forward, folder, optimizer="SGD"):
    """As it was written for the original: arguments by position, files by the names that these have."""
    folder.mkdir()
    package.generate_artifacts(
        str(forward), WEIGHTS[:2], WEIGHTS[2:3], package.LossType.CrossEntropyLoss,
        package.OptimType[optimizer], folder, additional_output_names=["y"],
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
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_script_of_the_original(optimizer, forward, tmp_path):
    theirs = importlib.import_module("onnxruntime.training.artifacts")
    losses, weights, inputs = script(artifacts, forward, tmp_path / "ours", optimizer)
    expected, weights_expected, inputs_expected = script(theirs, forward, tmp_path / "theirs", optimizer)
    if optimizer == "AdamW":
        ours, original = (_update(tmp_path / name) for name in ("ours", "theirs"))
        assert ours == original
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


def _update(folder):
    (node,) = onnx.load(folder / "optimizer_model.onnx").graph.node
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def small_updates(folder, names, inputs):
    """A weight after three updates by small gradients, of which epsilon is a part that shows."""
    checkpoint, train, update = names
    state = CheckpointState.load_checkpoint(folder / checkpoint)
    module = Module(folder / train, state)
    optimizer = Optimizer(folder / update, module)
    state.parameters["2.bias"] = np.full(3, 1e-2, np.float32)
    gradients = []
    for _ in range(3):
        module(*inputs)
        gradients.append(state.parameters["2.bias"].grad.astype(np.float64))
        optimizer.step()
        module.lazy_reset_grad()
    return state.parameters["2.bias"].data - 1e-2, gradients


PORTABLE = ("checkpoint.safetensors", "train_step.onnx", "train_step.onnx")
NAMES = ("checkpoint", "training_model.onnx", "optimizer_model.onnx")


@pytest.mark.parametrize(("flavour", "optimizer", "after"), [
    (None, artifacts.OptimType.AdamW, True), ("portable", artifacts.OptimType.AdamW, True),
    ("ort-training", Enum("OptimType", {"AdamW": 1}).AdamW, True), ("portable", "AdamW", False),
    ("ort-training", OptimizerConfig("AdamW"), False),
], ids=["original", "portable", "theirs", "torch", "config"])  # fmt: skip
def test_an_optim_type_has_the_settings_of_the_original(flavour, optimizer, after, forward, tmp_path):
    x, y = np.full((4, 6), 0.1, np.float32), np.zeros((4, 3), np.float32)
    model = onnx.load(forward)
    for tensor in model.graph.initializer:
        # the gradient is that of the last bias, 2 / 3 of it
        tensor.CopyFrom(onnx.numpy_helper.from_array(0 * onnx.numpy_helper.to_array(tensor), tensor.name))
    options = {"requires_grad": ["2.bias"], "loss": artifacts.LossType.MSELoss, "optimizer": optimizer}
    if flavour is None:
        artifacts.generate_artifacts(model, artifact_directory=tmp_path, **options)
    else:
        generate_artifacts(model, tmp_path, flavour=flavour, **options)
    moved, gradients = small_updates(tmp_path, PORTABLE if flavour == "portable" else NAMES, (x, y))
    np.testing.assert_allclose(gradients[0], 2e-2 / 3, rtol=1e-5)
    first, second, expected = 0.0, 0.0, 0.0
    for t, gradient in enumerate(gradients, start=1):
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        scale = (1 - 0.999**t) ** 0.5
        # torch adds 1e-8 to the corrected root, the original 1e-6 to the root itself
        root = (second**0.5 + 1e-6) / scale if after else second**0.5 / scale + 1e-8
        expected -= 1e-3 * first / (1 - 0.9**t) / root
    # the two differ by 3e-3 of it
    np.testing.assert_allclose(moved, expected, rtol=2e-5)


def test_without_names_nothing_is_trained(forward, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    artifacts.generate_artifacts(str(forward), loss=artifacts.LossType.MSELoss, prefix="p_")
    assert {p.name for p in tmp_path.glob("p_*")} == {"p_training_model.onnx", "p_eval_model.onnx", "p_checkpoint"}
    state = CheckpointState.load_checkpoint(tmp_path / "p_checkpoint")
    assert not list(state.parameters)
    module = Module(tmp_path / "p_training_model.onnx", state, tmp_path / "p_eval_model.onnx")
    assert np.isfinite(module(np.ones((2, 6), np.float32), np.ones((2, 3), np.float32)))
