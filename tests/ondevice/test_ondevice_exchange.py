"""Trainings that move from torch or ORTTrainer to a device and back, against those that stay where they are."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ondevice_models import config_of, rewritten
from ondevice_wheel import WHEEL, WheelTraining
from orttrainer_models import Recording, batches, make, trainer
from torch import nn

from lightning_ort.ondevice import (
    CheckpointState,
    Module,
    Optimizer,
    OptimizerConfig,
    copy_from_torch,
    copy_to_torch,
    generate_artifacts,
)  # fmt: skip


def opened(folder, checkpoint="checkpoint"):
    state = CheckpointState.load_checkpoint(folder / checkpoint)
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    return state, module, Optimizer(folder / "optimizer_model.onnx", module)


def torch_step(network, optimizer, x, y):
    loss = F.cross_entropy(network(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def device_step(module, optimizer, x, y):
    loss = module(x.numpy(), y.numpy())
    optimizer.step()
    module.lazy_reset_grad()
    return float(loss)


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(5, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    inputs = (torch.randn(6, 5), torch.randint(0, 4, (6,)))
    folder = tmp_path_factory.mktemp("network")
    return network, generate_artifacts(
        network, folder, inputs=inputs, loss="CrossEntropyLoss", flavour="ort-training", verify=False
    )


OPTIMIZERS = {
    "adamw": (lambda p: torch.optim.AdamW(p, 0.01), OptimizerConfig("AdamW", 0.01, weight_decay=0.01)),
    "adam": (lambda p: torch.optim.Adam(p, 0.01), OptimizerConfig("Adam", 0.01)),
    "sgd": (lambda p: torch.optim.SGD(p, 0.05), OptimizerConfig("SGD", 0.05)),
    "momentum": (lambda p: torch.optim.SGD(p, 0.05, 0.9), OptimizerConfig("SGD", 0.05, momentum=0.9)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_goes_to_the_device_and_back(name, generated, tmp_path):
    make_optimizer, config = OPTIMIZERS[name]
    data = [(torch.randn(6, 5), torch.randint(0, 4, (6,))) for _ in range(12)]
    stays, moves = copy.deepcopy(generated[0]), copy.deepcopy(generated[0])
    reference, optimizer = make_optimizer(stays.parameters()), make_optimizer(moves.parameters())
    expected = [torch_step(stays, reference, x, y) for x, y in data]
    losses = [torch_step(moves, optimizer, x, y) for x, y in data[:3]]
    # the checkpoint of the artifacts gets what torch has learned
    folder = rewritten(generated[1], tmp_path, config, "ort-training")
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    copy_from_torch(state, moves, optimizer)
    CheckpointState.save_checkpoint(state, folder / "checkpoint", include_optimizer_state=True)
    state, module, on_device = opened(folder)
    losses += [device_step(module, on_device, x, y) for x, y in data[3:6]]
    CheckpointState.save_checkpoint(state, folder / "checkpoint", include_optimizer_state=True)
    if WHEEL:
        wheel = WheelTraining(folder)
        wheel.optimizer.set_learning_rate(config.lr)
        losses += [float(wheel.step(x.numpy(), y.numpy())) for x, y in data[6:9]]
        wheel.save(folder / "checkpoint")
    else:
        state, module, on_device = opened(folder)
        losses += [device_step(module, on_device, x, y) for x, y in data[6:9]]
        CheckpointState.save_checkpoint(state, folder / "checkpoint", include_optimizer_state=True)
    fresh, other = copy.deepcopy(generated[0]), None
    other = make_optimizer(fresh.parameters())
    other.param_groups[0]["lr"] = 7.0
    copy_to_torch(folder / "checkpoint", fresh, other)
    assert other.param_groups[0]["lr"] == pytest.approx(config.lr)
    losses += [torch_step(fresh, other, x, y) for x, y in data[9:]]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)
    for key, value in stays.state_dict().items():
        torch.testing.assert_close(fresh.state_dict()[key], value, rtol=1e-4, atol=2e-5, msg=key)
    for p, q in zip(fresh.parameters(), stays.parameters(), strict=True):
        for key, value in reference.state[q].items():
            if value is not None:
                torch.testing.assert_close(other.state[p][key], value, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    x, labels = batches("mlp", 1)[0]
    return generate_artifacts(
        make("mlp"), tmp_path_factory.mktemp("mlp"), inputs={"x": x, "labels": labels}, loss="CrossEntropyLoss",
        flavour="ort-training", verify=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", ["mlp_adam_mode0_wd", "mlp_adam_mode1_wd", "FORMULA_mlp_lamb_lr1e-2_wd", "mlp_sgd_lr1e-1"]
)
def test_an_orttrainers_training_goes_to_the_device_and_back(name, mlp, tmp_path):
    recording = Recording(name)
    data = batches("mlp")
    first, losses, _, _ = recording.train(7)
    folder = rewritten(mlp, tmp_path, config_of(recording), "ort-training")
    state, module, optimizer = opened(folder)
    # the module and its optimizer go on from what arrives later
    copy_from_torch(state, first)
    losses += [device_step(module, optimizer, x, y) for x, y in data[7:13]]
    second = trainer(recording.config(), "mlp", **recording.options())
    copy_to_torch(state, second)
    losses += [float(second.train_step(x, y)[0]) for x, y in data[13:]]
    np.testing.assert_allclose(losses, recording.arrays["losses"], rtol=0, atol=2e-6)
    assert second._train_step_info.optimization_step == 20


def test_what_does_not_fit_changes_nothing(mlp, tmp_path):
    folder = rewritten(mlp, tmp_path, OptimizerConfig("AdamW", 0.01), "ort-training")
    state, module, on_device = opened(folder)
    network = make("mlp")
    x, y = batches("mlp", 1)[0]
    device_step(module, on_device, x, y)
    sgd = torch.optim.SGD(network.parameters(), 0.1)
    adam = torch.optim.AdamW(network.parameters(), 0.1)
    before = copy.deepcopy(network.state_dict())
    stored = {n: p.data for n, p in state.parameters}

    def refused(match, *arguments, copying=copy_to_torch, error=ValueError):
        with pytest.raises(error, match=match):
            copying(*arguments)
        assert all(torch.equal(t, before[n]) for n, t in network.state_dict().items())
        assert all(np.array_equal(p.data, stored[n]) for n, p in state.parameters)

    refused("holds the state of AdamW, but the optimizer is SGD", state, network, sgd)
    refused("The optimizer is SGD, but the checkpoint's is AdamW", state, network, sgd, copying=copy_from_torch)
    refused("checkpoint holds fc2.bias, .*does not have", state, nn.ModuleDict({"fc1": network.fc1}))
    refused("lacks parameters of the module: extra", state, _with(network, "extra"))
    wide = copy.deepcopy(network)
    wide.fc2 = nn.Linear(32, 17)
    refused(r"'fc2.weight' is .* \[16, 32\] in the checkpoint and .* \[17, 32\]", state, wide)
    part = torch.optim.AdamW(network.fc1.parameters(), 0.1)
    refused("checkpoint trains fc2.weight, .* of which the optimizer has nothing", state, network, part)
    groups = torch.optim.AdamW([{"params": network.fc1.parameters(), "lr": 0.2}, {"params": [
        *network.fc2.parameters(), *network.fc3.parameters()]}], 0.1)  # fmt: skip
    refused(r"learning rates \[0.1, 0.2\]; a device has one", state, network, groups, copying=copy_from_torch)
    refused("amsgrad", state, network, torch.optim.AdamW(network.parameters(), 0.1, amsgrad=True))
    refused("expected torch's AdamW, Adam or SGD", state, network, torch.optim.Adagrad(network.parameters()))
    refused("module is a dict", state, {}, error=TypeError)
    refused("state is a str", "path", network, copying=copy_from_torch, error=TypeError)
    CheckpointState.save_checkpoint(state, tmp_path / "bare")
    state.training_state.optimizer.moments.clear()
    refused("holds no optimizer state", state, network, adam)
    assert not adam.state_dict()["state"]


def _with(network, name):
    other = copy.deepcopy(network)
    other.register_parameter(name, nn.Parameter(torch.zeros(2)))
    return other


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.unused = nn.Linear(5, 8), nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x).tanh())


def test_an_optimizer_of_more_than_leads_to_the_loss(tmp_path):
    """As it comes with ``module.parameters()``: what gets no gradient has no state."""
    torch.manual_seed(0)
    network, x, y = TwoHeads(), torch.randn(6, 5), torch.randint(0, 4, (6,))
    optimizer = torch.optim.AdamW(network.parameters(), 0.01)
    twin = copy.deepcopy(network)
    other = torch.optim.AdamW(twin.parameters(), 0.01)
    for _ in range(2):
        torch_step(network, optimizer, x, y), torch_step(twin, other, x, y)
    generate_artifacts(
        network, tmp_path, inputs=(x, y), loss="CrossEntropyLoss", optimizer=optimizer, flavour="ort-training"
    )
    state, module, on_device = opened(tmp_path)
    for _ in range(3):
        on, off = device_step(module, on_device, x, y), torch_step(twin, other, x, y)
        assert on == pytest.approx(off, rel=1e-5)
    copy_to_torch(state, network, optimizer)
    for _ in range(2):
        assert torch_step(network, optimizer, x, y) == pytest.approx(torch_step(twin, other, x, y), rel=1e-5)
    copy_from_torch(state, network, optimizer)
    network.unused(network.body(x)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"has trained unused\.weight, unused\.bias, which the"):
        copy_from_torch(state, network, optimizer)
