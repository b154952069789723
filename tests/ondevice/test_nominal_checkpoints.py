"""Checkpoints without values, which are completed on the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ondevice_models import train
from ondevice_wheel import WheelTraining, needs_wheel
from safetensors import safe_open
from torch import nn

from lightning_ort.ondevice import (
    CheckpointState,
    Module,
    Optimizer,
    OptimizerConfig,
    copy_from_torch,
    generate_artifacts,
)

PORTABLE, ORT = "portable", "ort-training"
NAMES = {
    PORTABLE: ("train_step.onnx", "eval_step.onnx", "train_step.onnx", ".safetensors"),
    ORT: ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", ""),
}
WEIGHTS = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]


def network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 2))
    net[1].running_mean.copy_(torch.linspace(-1, 1, 40))
    return net


def batches(count: int = 4) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 3, generator=generator), torch.arange(8) % 2) for _ in range(count)]


@pytest.fixture(scope="module", params=[PORTABLE, ORT])
def written(request, tmp_path_factory):
    folder, flavour = tmp_path_factory.mktemp("nominal"), request.param
    net = network()
    optimizer = torch.optim.AdamW([p for n, p in net.named_parameters() if n != "3.bias"], 0.02)
    net(batches()[0][0]).square().sum().backward()
    optimizer.step()
    generate_artifacts(
        net, folder, inputs=batches()[0], loss="CrossEntropyLoss", optimizer=optimizer, frozen_params=["3.bias"],
        flavour=flavour, nominal_checkpoint=True, verify=False, prefix="a_",
    )  # fmt: skip
    return folder, flavour


def opened(folder: Path, flavour: str, checkpoint: str) -> tuple[CheckpointState, Module, Optimizer]:
    training, evaluation, update, suffix = NAMES[flavour]
    state = CheckpointState.load_checkpoint(folder / f"{checkpoint}{suffix}")
    module = Module(folder / f"a_{training}", state, folder / f"a_{evaluation}")
    return state, module, Optimizer(folder / f"a_{update}", module)


def test_a_nominal_checkpoint_is_completed_by_a_buffer(written, tmp_path):
    folder, flavour = written
    state, module, optimizer = opened(folder, flavour, "a_checkpoint")
    other, nominal, fresh = opened(folder, flavour, "a_nominal_checkpoint")
    assert [name for name, _ in other.parameters] == WEIGHTS and not dict(other.parameters)["3.bias"].requires_grad
    assert fresh.get_learning_rate() == optimizer.get_learning_rate() == pytest.approx(0.02, rel=1e-7)
    assert (optimizer.step_count, fresh.step_count) == (1, 0)
    x, y = (t.numpy() for t in batches()[0])
    uses = [
        (lambda: nominal(x, y), "the model parameters"),
        (nominal.get_contiguous_parameters, "the model parameters"),
    ]
    uses += [(fresh.step, "the model parameters"), (lambda: other.parameters["0.bias"], "the parameter states")]
    uses += [(lambda: dict(other.parameters)["0.bias"].grad, "the parameter states")]
    uses += [(lambda: other.parameters.__setitem__("0.bias", x), "all the parameter states")]
    for use, what in uses:
        with pytest.raises(
            RuntimeError, match=f"no values yet: the checkpoint is a nominal one.* Please load {what} first"
        ):
            use()
    with pytest.raises(ValueError, match="a nominal one, which has no values"):
        copy_from_torch(other, network())
    flat = module.get_contiguous_parameters(False)
    with pytest.raises(ValueError, match="give them with trainable_only=False"):
        nominal.copy_buffer_to_parameters(module.get_contiguous_parameters(True), True)

    # without values it is written again, and read again
    path = tmp_path / "again"
    CheckpointState.save_checkpoint(other, path, include_optimizer_state=True)
    again = CheckpointState.load_checkpoint(path).training_state
    assert again.nominal and list(again.parameters) == WEIGHTS

    nominal.copy_buffer_to_parameters(flat, False)
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(other.parameters[name].data, parameter.data)
    for name, buffer in state.training_state.buffers.items():
        np.testing.assert_array_equal(other.training_state.buffers[name], buffer)
    assert nominal.eval()(x, y) == module.eval()(x, y)
    # as torch goes on with a new optimizer, whose moments are zero
    reference, losses = network(), []
    copied = state.training_state.tensors
    reference.load_state_dict({n: t.clone() for n, t in copied.items()}, strict=False)
    adam = torch.optim.AdamW([p for n, p in reference.named_parameters() if n != "3.bias"], 0.02)
    for inputs, targets in batches():
        loss = nn.functional.cross_entropy(reference(inputs), targets)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    np.testing.assert_allclose(train(nominal, fresh, batches()), losses, rtol=1e-5)
    for name, parameter in reference.named_parameters():
        # the first bias has no gradient but rounding: normalization takes the mean away
        if name != "0.bias":
            np.testing.assert_allclose(other.parameters[name].data, parameter.detach(), rtol=0, atol=2e-5)
    CheckpointState.save_checkpoint(other, path)
    assert not CheckpointState.load_checkpoint(path).training_state.nominal


def test_a_buffer_brings_running_statistics(written):
    folder, flavour = written
    state, module, optimizer = opened(folder, flavour, "a_checkpoint")
    train(module, optimizer, batches())
    other, nominal, _ = opened(folder, flavour, "a_nominal_checkpoint")
    flat = module.get_contiguous_parameters()
    assert flat.numpy().size == module.get_parameters_size(False) == 322 + 81
    nominal.copy_buffer_to_parameters(flat, trainable_only=False)
    for name, buffer in state.training_state.buffers.items():
        assert not torch.equal(buffer, network().state_dict()[name])
        assert torch.equal(other.training_state.buffers[name], buffer)
    x, y = (t.numpy() for t in batches()[0])
    assert nominal.eval()(x, y) == module.eval()(x, y)
    # parameters, then buffers, as ONNX Runtime's API has them
    order = [t.numpy().ravel() for t in state.training_state.tensors.values()]
    np.testing.assert_array_equal(flat.numpy(), np.concatenate(order))
    # and back
    nominal.train()
    train(nominal, Optimizer(folder / f"a_{NAMES[flavour][2]}", nominal), batches())
    module.copy_buffer_to_parameters(nominal.get_contiguous_parameters(), trainable_only=False)
    assert nominal.eval()(x, y) == module(x, y)
    assert {int(t) for n, t in state.training_state.buffers.items() if "tracked" in n} == {9}
    wrong = r"322 elements .*; the parameters, which are 322, and the running statistics together are 403 of torch.fl"
    with pytest.raises(ValueError, match=wrong):
        module.copy_buffer_to_parameters(flat.numpy()[:322], trainable_only=False)
    assert nominal(x, y) == module(x, y)


def test_the_file_holds_no_values(written):
    folder, flavour = written
    suffix = NAMES[flavour][3]
    sizes = [(folder / f"{name}{suffix}").stat().st_size for name in ("a_nominal_checkpoint", "a_checkpoint")]
    # the least that values and moments take: 40 * 3 + 3 * 40 + 2 * 40 numbers, three times
    assert sizes[1] - sizes[0] > 4 * 320 * 3 - 2000
    if flavour == PORTABLE:
        with safe_open(folder / "a_nominal_checkpoint.safetensors", "np") as file:
            assert sorted(file.keys()) == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]


@needs_wheel
def test_onnx_runtime_trains_from_a_nominal_checkpoint(tmp_path):
    config = OptimizerConfig("AdamW", 0.02)
    generate_artifacts(
        network(), tmp_path, inputs=batches()[0], loss="CrossEntropyLoss", optimizer=config, flavour=ORT,
        nominal_checkpoint=True, verify=False,
    )  # fmt: skip
    complete = WheelTraining(tmp_path)
    nominal = WheelTraining(tmp_path, tmp_path / "nominal_checkpoint")
    nominal.module.copy_buffer_to_parameters(complete.module.get_contiguous_parameters(False), False)
    # made anew: set_learning_rate of one that is older than the values is a segmentation fault, also on their own files
    nominal.optimizer = nominal.api.Optimizer(str(tmp_path / "optimizer_model.onnx"), nominal.module)
    for training in (complete, nominal):
        training.optimizer.set_learning_rate(0.02)
    arrays = [[t.numpy() for t in batch] for batch in batches()]
    losses = [float(nominal.step(*batch)) for batch in arrays]
    assert losses == [float(complete.step(*batch)) for batch in arrays]
    moved = nominal.data()["0.weight"] - network()[0].weight.detach().numpy()
    np.testing.assert_array_less(0.01, np.abs(moved).max())
    for name, value in complete.data().items():
        np.testing.assert_array_equal(nominal.data()[name], value)


def test_a_damaged_nominal_checkpoint_is_refused(written, tmp_path):
    folder, flavour = written
    name = f"a_nominal_checkpoint{NAMES[flavour][3]}"
    data = (folder / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"a_nominal_checkpoint.*(damaged|truncated)"):
        CheckpointState.load_checkpoint(tmp_path / name)
    if flavour == PORTABLE:
        (tmp_path / name).write_bytes(data.replace(b"[40, 3]", b"[-4, 3]"))
        with pytest.raises(ValueError, match=r"does not fit together: \[-4, 3\] is no shape"):
            CheckpointState.load_checkpoint(tmp_path / name)
