"""Several modules and optimizers of one state, which train the same memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ondevice_models import train
from orttrainer_models import batches, make

from lightning_ort.ondevice import CheckpointState, Module, Optimizer, OptimizerConfig, generate_artifacts

FILES = {
    "portable": ("checkpoint.safetensors", "train_step.onnx", "update.onnx"),
    "ort-training": ("checkpoint", "training_model.onnx", "optimizer_model.onnx"),
}
OPTIMIZERS = {
    "AdamW": OptimizerConfig("AdamW", 0.05), "clipped": OptimizerConfig("AdamW", 0.05, clip_grad_norm=0.5),
    "momentum": OptimizerConfig("SGD", 0.05, momentum=0.9), "Lamb": OptimizerConfig("Lamb", 0.05),
}  # fmt: skip


def opened(folder, flavour, checkpoint=None):
    names = FILES[flavour]
    state = CheckpointState.load_checkpoint(checkpoint or folder / names[0])
    module = Module(folder / names[1], state)
    return state, module, Optimizer(folder / names[2], module)


@pytest.mark.parametrize("again", ["optimizer", "module", "both"])
@pytest.mark.parametrize(
    ("flavour", "name"), [*(("portable", n) for n in OPTIMIZERS), ("ort-training", "AdamW")], ids=lambda v: v
)
def test_all_go_on_from_where_one_is(flavour, name, again, tmp_path):
    _, train_file, update_file = FILES[flavour]
    generate_artifacts(
        make(), tmp_path, inputs=batches()[0], loss="CrossEntropyLoss", optimizer=OPTIMIZERS[name], flavour=flavour,
        verify=False,
    )  # fmt: skip
    data = batches(count=9)
    expected, module, optimizer = opened(tmp_path, flavour)
    train(module, optimizer, data)

    state, module, optimizer = opened(tmp_path, flavour)
    train(module, optimizer, data[:2])
    other = module if again == "optimizer" else Module(tmp_path / train_file, state)
    update = optimizer if again == "module" else Optimizer(tmp_path / update_file, other)
    # each of them in turns
    train(module, optimizer, data[2:4])
    train(other, update, data[4:5])
    train(module, update, data[5:6])
    assert update.step_count == optimizer.step_count == 6
    CheckpointState.save_checkpoint(state, tmp_path / "saved", include_optimizer_state=True)
    state, module, optimizer = opened(tmp_path, flavour, tmp_path / "saved")
    train(module, optimizer, data[6:])
    for key, parameter in state.parameters:
        np.testing.assert_allclose(parameter.data, expected.parameters[key].data, rtol=0, atol=2e-6, err_msg=key)


def test_gradients_are_those_of_the_state(tmp_path):
    generate_artifacts(make(), tmp_path, inputs=batches()[0], loss="CrossEntropyLoss", verify=False)
    state, module, _ = opened(tmp_path, "portable")
    x, y = (t.numpy() for t in batches()[0])
    module(x, y)
    once = state.parameters["fc3.bias"].grad
    other = Module(tmp_path / "train_step.onnx", state)
    other(x, y)
    np.testing.assert_allclose(state.parameters["fc3.bias"].grad, 2 * once, rtol=0, atol=1e-6)
    other.lazy_reset_grad()
    module(x, y)
    np.testing.assert_allclose(state.parameters["fc3.bias"].grad, once, rtol=0, atol=1e-6)


@pytest.mark.parametrize("flavour", FILES)
def test_values_arrive_in_all_modules_of_a_nominal_state(flavour, tmp_path):
    generate_artifacts(
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)), tmp_path, flavour=flavour,
        inputs=(torch.randn(5, 4), torch.randn(5, 3)), loss="MSELoss", nominal_checkpoint=True, verify=False,
    )  # fmt: skip
    _, module, _ = opened(tmp_path, flavour)
    buffer = module.get_contiguous_parameters()
    state = CheckpointState.load_checkpoint(tmp_path / f"nominal_{FILES[flavour][0]}")
    first, second = (Module(tmp_path / FILES[flavour][1], state) for _ in range(2))
    second.copy_buffer_to_parameters(buffer, trainable_only=False)
    x, y = np.ones((5, 4), np.float32), np.zeros((5, 3), np.float32)
    np.testing.assert_array_equal(first(x, y), module(x, y))
    np.testing.assert_array_equal(
        second.get_contiguous_parameters().numpy(), module.get_contiguous_parameters().numpy()
    )
