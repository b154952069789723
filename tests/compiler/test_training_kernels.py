"""Operators for gradients of builds for training: used where they are there, with the same results."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_ort import ondevice
from lightning_ort.compiler.passes import with_training_kernels
from lightning_ort.ondevice.formats import flavour_of_model
from lightning_ort.runtime.providers.cpu import has_training_kernels

LABELS = {
    "all count": [3, 1, 0, 4, 2, 2],
    "some count": [3, -100, 0, -100, 2, 2],
    "none counts": [-100] * 6,
}


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))


@pytest.fixture(scope="module")
def artifacts(network, tmp_path_factory):
    folder = tmp_path_factory.mktemp("artifacts")
    example = (torch.randn(6, 4), torch.tensor(LABELS["all count"]))
    ondevice.generate_artifacts(
        network, folder, inputs=example, loss="CrossEntropyLoss", optimizer="AdamW", flavour="ort-training"
    )
    return folder


def opened(folder):
    state = ondevice.CheckpointState.load_checkpoint(folder / "checkpoint")
    return state, ondevice.Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")


def test_builds_for_training_have_them():
    assert has_training_kernels() == (importlib.util.find_spec("onnxruntime.training") is not None)


def test_the_gradient_of_the_loss_is_one_operator(artifacts):
    state = ondevice.CheckpointState.load_checkpoint(artifacts / "checkpoint")
    path = artifacts / "training_model.onnx"
    step = flavour_of_model(path).load_train_step(path, state.training_state)
    standard = [n.op_type for n in step.model.graph]
    shorter = with_training_kernels(step.model)
    found = [n.op_type for n in shorter.graph]
    assert found.count("SoftmaxCrossEntropyLossGrad") == 1
    assert not {"ScatterElements", "Exp"} & set(found)
    assert "GatherElements" in found  # which refuses labels that are no classes
    assert [n.op_type for n in step.model.graph] == standard


@pytest.mark.parametrize("labels", LABELS)
def test_gradients_are_torchs(network, artifacts, labels):
    x, y = torch.randn(6, 4), torch.tensor(LABELS[labels])
    loss = F.cross_entropy(network(x), y)
    expected = torch.autograd.grad(loss, list(network.parameters()))
    state, module = opened(artifacts)
    got = module(x.numpy(), y.numpy())
    np.testing.assert_allclose(got, loss.item(), rtol=1e-6)
    for (name, _), gradient in zip(network.named_parameters(), expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(state.parameters[name].grad), gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("label", [-1, -3, 5, np.iinfo(np.int64).min, np.iinfo(np.int64).max])
def test_labels_that_are_no_classes_are_refused(artifacts, label):
    _, module = opened(artifacts)
    x, y = np.zeros((6, 4), np.float32), np.array(LABELS["all count"])
    good = module(x, y)
    module.lazy_reset_grad()
    y[2] = label
    with pytest.raises((IndexError, RuntimeError), match=r"(?i)out of"):
        module(x, y)
    y[2] = 0
    module.lazy_reset_grad()
    assert module(x, y) == good
