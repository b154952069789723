"""The classes of the on-device API: state, gradients, checkpoints, schedule, and what they refuse."""

from __future__ import annotations

import json
import re

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from ondevice_models import opened, train
from orttrainer_models import batches, make
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_ort import RefusedValueError
from lightning_ort.ondevice import (
    CheckpointState,
    LinearLRScheduler,
    LossType,
    Module,
    Optimizer,
    OptimizerConfig,
    OptimType,
    generate_artifacts,
)

FROZEN = "fc1.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("artifacts")
    x, y = batches()[0]
    generate_artifacts(
        make(), directory, inputs={"x": x, "labels": y}, loss="CrossEntropyLoss", frozen_params=[FROZEN],
        optimizer=OptimizerConfig("AdamW", 0.01, weight_decay=0.1), additional_output_names=["output"],
    )  # fmt: skip
    return directory


@pytest.fixture
def artifacts(written, tmp_path):
    """A copy that a test may spoil."""
    for path in written.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def arrays(k=0):
    return [t.numpy() for t in batches()[k]]


def test_gradients_accumulate_as_a_sum_until_they_are_reset(written):
    state, module, optimizer = opened(written)
    np.testing.assert_array_equal(state.parameters["fc2.weight"].grad, np.zeros((16, 32), np.float32))
    expected = torch.zeros(16, 32)
    for k in range(3):
        module(*arrays(k))
        network = make()
        F.cross_entropy(network(batches()[k][0]), batches()[k][1]).backward()
        expected += network.fc2.weight.grad
        np.testing.assert_allclose(state.parameters["fc2.weight"].grad, expected, rtol=0, atol=1e-6)
    assert state.parameters[FROZEN].grad is None and not state.parameters[FROZEN].requires_grad
    module.lazy_reset_grad()
    np.testing.assert_allclose(state.parameters["fc2.weight"].grad, expected, rtol=0, atol=1e-6)
    module(*arrays(2))
    np.testing.assert_allclose(state.parameters["fc2.weight"].grad, network.fc2.weight.grad, rtol=0, atol=1e-6)
    before = state.parameters[FROZEN].data
    optimizer.step()
    np.testing.assert_array_equal(state.parameters[FROZEN].data, before)
    assert np.abs(state.parameters["fc2.weight"].data - make().fc2.weight.detach().numpy()).max() > 5e-3


def test_inputs_come_back_in_the_form_in_which_they_were_given(written):
    _, module, _ = opened(written)
    module.eval()
    x, y = arrays()
    loss, output = module(x, y)
    network = make()
    np.testing.assert_allclose(output, network(torch.from_numpy(x)).detach(), rtol=0, atol=1e-6)
    assert isinstance(loss, np.ndarray) and loss.shape == ()
    values = module(*[onnxruntime.OrtValue.ortvalue_from_numpy(a) for a in (x, y)])
    assert all(isinstance(v, onnxruntime.OrtValue) for v in values)
    np.testing.assert_array_equal(values[1].numpy(), output)
    tensors = module(torch.from_numpy(x), torch.from_numpy(y))
    assert all(isinstance(t, torch.Tensor) for t in tensors)
    np.testing.assert_array_equal(tensors[1], output)
    # a view that does not lie in order, and other sizes
    loss, shorter = module(np.asfortranarray(x)[:5], y[:5])
    np.testing.assert_allclose(shorter, output[:5], rtol=0, atol=1e-6)
    # what was given out does not change
    np.testing.assert_array_equal(tensors[1], output)
    assert module.input_names() == ["x", "labels"] and module.output_names() == ["loss", "output"]


def test_parameters_are_read_and_written(written):
    state, module, _ = opened(written)
    parameters = state.parameters
    assert len(parameters) == 6 and FROZEN in parameters and "missing" not in parameters
    assert [name for name, _ in parameters] == [n for n, _ in make().named_parameters()]
    assert repr(parameters[FROZEN]) == f"Parameter(name={FROZEN}, requires_grad=False)"
    module.eval()
    parameters["fc3.bias"] = np.arange(10, dtype=np.float32)
    parameters["fc3.weight"].data = torch.zeros(10, 16)
    _, output = module(*arrays())
    np.testing.assert_array_equal(output, np.tile(np.arange(10, dtype=np.float32), (16, 1)))
    for value, message in (
        (np.zeros(9, np.float32), r"shape \(10,\); got torch.float32 of shape \(9,\)"),
        (np.zeros(10), "got torch.float64"),
    ):
        with pytest.raises(ValueError, match=message):
            parameters["fc3.bias"] = value
    with pytest.raises(KeyError, match=r"no parameter 'missing'. There are: fc1.weight"):
        parameters["missing"] = np.zeros(1)
    np.testing.assert_array_equal(parameters["fc3.bias"].data, np.arange(10))


def test_contiguous_parameters_go_from_device_to_device(written):
    state, module, optimizer = opened(written)
    module(*arrays())
    optimizer.step()
    sizes = {n: p.data.size for n, p in state.parameters}
    assert module.get_parameters_size() == sum(sizes.values()) - sizes[FROZEN]
    assert module.get_parameters_size(False) == sum(sizes.values())
    whole, trained = module.get_contiguous_parameters(), module.get_contiguous_parameters(trainable_only=True)
    np.testing.assert_array_equal(whole.numpy(), np.concatenate([p.data.ravel() for _, p in state.parameters]))
    other_state, other, _ = opened(written)
    other.copy_buffer_to_parameters(trained)
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(other_state.parameters[name].data, parameter.data)
    halved = onnxruntime.OrtValue.ortvalue_from_numpy(whole.numpy() / 2)
    other.copy_buffer_to_parameters(halved, trainable_only=False)
    np.testing.assert_array_equal(other_state.parameters[FROZEN].data, state.parameters[FROZEN].data / 2)
    with pytest.raises(ValueError, match=r"buffer holds \d+ elements of torch.float32; the parameters are \d+"):
        other.copy_buffer_to_parameters(halved)
    np.testing.assert_array_equal(other_state.parameters["fc3.bias"].data, state.parameters["fc3.bias"].data / 2)


def test_training_goes_on_from_a_checkpoint(written, tmp_path):
    data = batches(count=6)
    state, module, optimizer = opened(written)
    state.properties["epoch"] = 3
    state.properties["loss"] = 0.5
    state.properties["note"] = "half way"
    train(module, optimizer, data[:3])
    optimizer.set_learning_rate(0.02)
    CheckpointState.save_checkpoint(state, tmp_path / "whole", include_optimizer_state=True)
    CheckpointState.save_checkpoint(state, tmp_path / "weights")
    expected = train(module, optimizer, data[3:])

    again = CheckpointState.load_checkpoint(tmp_path / "whole")
    assert dict(again.properties) == {"epoch": 3, "loss": 0.5, "note": "half way"}
    resumed = Module(written / "gradients.onnx", again)
    optimizer = Optimizer(written / "train_step.onnx", resumed)
    assert optimizer.get_learning_rate() == 0.02 and optimizer.step_count == 3
    assert train(resumed, optimizer, data[3:]) == expected

    weights = CheckpointState.load_checkpoint(tmp_path / "weights")
    fresh = Optimizer(written / "train_step.onnx", Module(written / "train_step.onnx", weights))
    assert fresh.get_learning_rate() == 0.02 and fresh.step_count == 0
    assert not weights.training_state.optimizer.moments["fc3.bias"]["moment_1"].any()


def test_learning_rate_rises_and_falls(written):
    _, module, optimizer = opened(written)
    scheduler = LinearLRScheduler(optimizer, 3, 10, 0.3)
    rates = []
    for k in range(12):
        module(*arrays(k))
        rates.append(optimizer.get_learning_rate())
        optimizer.step()
        scheduler.step()
    expected = [0, 0.1, 0.2, 0.3] + [0.3 * (10 - k) / 7 for k in range(4, 10)] + [0, 0]
    np.testing.assert_allclose(rates, expected, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="0 <= warmup_step_count <= total_step_count"):
        LinearLRScheduler(optimizer, 4, 3, 0.1)
    with pytest.raises(ValueError, match="learning_rate=-1: expected a number from 0"):
        optimizer.set_learning_rate(-1)


def test_the_inference_model_holds_the_trained_weights(written, tmp_path):
    state, module, optimizer = opened(written)
    module(*arrays())
    optimizer.step()
    module.export_model_for_inferencing(tmp_path / "model.onnx", ["output"])
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["x"]
    (got,) = session.run(["output"], {"x": arrays()[0]})
    np.testing.assert_allclose(got, module.eval()(*arrays())[1], rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"no value 'logits'. It gives: loss, output"):
        module.export_model_for_inferencing(tmp_path / "other.onnx", ["logits"])
    assert not (tmp_path / "other.onnx").exists()
    with pytest.raises(RuntimeError, match="no evaluation graph: give eval_model_uri"):
        Module(written / "train_step.onnx", state).export_model_for_inferencing(tmp_path / "other.onnx", ["output"])


def test_large_weights_lie_beside_the_inference_model(written, tmp_path, monkeypatch):
    _, module, _ = opened(written)
    monkeypatch.setattr("lightning_ort.files.onnx_models.LARGEST_FILE", 1000)
    module.export_model_for_inferencing(tmp_path / "model.onnx", ["output"])
    data, model = sorted(tmp_path.iterdir())
    assert model.name == "model.onnx" and re.fullmatch(r"model\.[0-9a-f]{8}\.data", data.name)
    assert data.stat().st_size >= 4 * 20 * 32
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (got,) = session.run(["output"], {"x": arrays()[0]})
    np.testing.assert_allclose(got, module.eval()(*arrays())[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (lambda x, y: (x,), ValueError, r"takes 2 inputs \(x, labels\), but got 1"),
        (lambda x, y: (x.astype(np.float64), y), ValueError, "'x' is torch.float64; expected torch.float32"),
        (lambda x, y: (x[:, :5], y), ValueError, r"'x' has shape \(16, 5\); expected \['batch', 20\]"),
        (lambda x, y: (x, y[:7]), ValueError, r"'labels' has shape \(7,\); expected \['batch'\], where batch is 16"),
        (lambda x, y: (x, y.tolist()), TypeError, "'labels' is a list; expected a numpy array, an OrtValue or a torch"),
    ],
    ids=["count", "dtype", "shape", "batch", "list"],
)
def test_inputs_that_do_not_fit_change_nothing(written, inputs, error, message):
    state, module, optimizer = opened(written)
    module(*arrays())
    gradient = state.parameters["fc3.bias"].grad
    with pytest.raises(error, match=message):
        module(*inputs(*arrays(1)))
    np.testing.assert_array_equal(state.parameters["fc3.bias"].grad, gradient)
    assert optimizer.step_count == 0


@pytest.mark.parametrize("steps", [0, 2])
def test_a_label_that_is_no_class_is_refused_by_the_name_of_the_input(written, steps):
    state, module, _ = opened(written)
    for _ in range(steps):
        module(*arrays())
        module.lazy_reset_grad()
    before = {name: p.data for name, p in state.parameters}
    x, labels = arrays()
    for label in (-3, 16):
        with pytest.raises(RefusedValueError, match=r"label.* is out of range .* come from the input 'labels'"):
            module(x, np.where(np.arange(len(labels)) == 1, label, labels))
    assert all(np.array_equal(p.data, before[name]) for name, p in state.parameters)


def test_steps_in_the_wrong_order_are_refused(written):
    state, _, optimizer = opened(written)
    with pytest.raises(RuntimeError, match="no gradients yet: call the module in training mode"):
        optimizer.step()
    assert optimizer.step_count == 0
    module = Module(written / "train_step.onnx", state)
    with pytest.raises(RuntimeError, match="no evaluation graph"):
        module.eval()(*arrays())
    with pytest.raises(ValueError, match="device='cuda': expected 'cpu'"):
        Module(written / "train_step.onnx", state, device="cuda")
    with pytest.raises(TypeError, match="state is a dict; expected a CheckpointState"):
        Module(written / "train_step.onnx", {})
    with pytest.raises(TypeError, match="Property 'x' is a list; expected an int, a float or a str"):
        state.properties["x"] = [1]


@pytest.mark.parametrize("flavour", ["portable", "ort-training"])
def test_where_nothing_is_trained_there_are_losses_all_the_same(tmp_path, flavour):
    """Training steps change running statistics alone; there is no optimizer, and no gradient."""
    network = torch.nn.Sequential(torch.nn.Linear(20, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 10))
    x, y = batches()[0]
    written = generate_artifacts(
        network, tmp_path, inputs=(x, y), loss=LossType.CrossEntropyLoss, requires_grad=[], flavour=flavour
    )
    assert written.optimizer is None and not [p for p in tmp_path.iterdir() if "optim" in p.name]
    (checkpoint,) = tmp_path.glob("checkpoint*")
    state = CheckpointState.load_checkpoint(checkpoint)
    train = tmp_path / ("gradients.onnx" if flavour == "portable" else "training_model.onnx")
    module = Module(train, state, tmp_path / ("eval_step.onnx" if flavour == "portable" else "eval_model.onnx"))
    for training in (True, True, False):
        got = module.train(training)(x.numpy(), y.numpy())
        expected = F.cross_entropy(network.train(training)(x), y).item()
        assert got == pytest.approx(expected, abs=1e-5)
    assert state.parameters["0.weight"].grad is None and module.get_parameters_size() == 0
    with pytest.raises(ValueError, match="no such parameters: the checkpoint has none, or none that is trained"):
        module.get_contiguous_parameters(trainable_only=True)
    with pytest.raises(ValueError, match="No parameter is trained: requires_grad and frozen_params leave none"):
        generate_artifacts(
            network, tmp_path, inputs=(x, y), loss="CrossEntropyLoss", requires_grad=[], optimizer=OptimType.SGD
        )


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.aside = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("flavour", ["portable", "ort-training"])
@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_what_does_not_lead_to_the_loss_stays(tmp_path, flavour, kind):
    """It has no gradient in torch, and therefore no update: weight decay is one as well."""
    module, (x, y) = TwoHeads(), (torch.randn(6, 4), torch.arange(6) % 3)
    config = OptimizerConfig(kind, lr=0.01, weight_decay=0.1)
    generate_artifacts(module, tmp_path, inputs=(x, y), loss="CrossEntropyLoss", optimizer=config, flavour=flavour)
    (checkpoint,) = tmp_path.glob("checkpoint*")
    state = CheckpointState.load_checkpoint(checkpoint)
    files = ("train_step.onnx",) * 2 if flavour == "portable" else ("training_model.onnx", "optimizer_model.onnx")
    trained = Module(tmp_path / files[0], state)
    optimizer = Optimizer(tmp_path / files[1], trained)
    theirs = getattr(torch.optim, kind)(module.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(5):
        trained(x.numpy(), y.numpy())
        optimizer.step()
        trained.lazy_reset_grad()
        theirs.zero_grad()
        F.cross_entropy(module(x), y).backward()
        theirs.step()
    for name, p in module.named_parameters():
        torch.testing.assert_close(torch.as_tensor(state.parameters[name].data), p.detach(), rtol=1e-4, atol=1e-5)


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def spoil_metadata(path):
    tensors = load_file(path)
    save_file(tensors, path)


SPOILED = {
    "no_checkpoint": (lambda d: (d / "checkpoint.safetensors").unlink(), FileNotFoundError, "There is no checkpoint"),
    "truncated_checkpoint": (
        lambda d: (d / "checkpoint.safetensors").write_bytes((d / "checkpoint.safetensors").read_bytes()[:-50]),
        ValueError, "no checkpoint, or a damaged one",
    ),
    "foreign_checkpoint": (
        lambda d: (d / "checkpoint.safetensors").write_bytes(b"\x80\x04\x95pickled?"), ValueError,
        "is not a checkpoint of on-device training",
    ),
    "other_tensors": (lambda d: spoil_metadata(d / "checkpoint.safetensors"), ValueError, "tensors, but no training"),
    "no_graph": (lambda d: (d / "gradients.onnx").unlink(), FileNotFoundError, r"gradients.onnx' is missing"),
    "truncated_graph": (
        lambda d: (d / "gradients.onnx").write_bytes((d / "gradients.onnx").read_bytes()[:1000]),
        ValueError, r"gradients.onnx' is no ONNX model, or a damaged one",
    ),
    "other_graph": (
        lambda d: (d / "gradients.onnx").write_bytes((d / "update.onnx").read_bytes()), ValueError,
        r"manifest.json' does not describe gradients.onnx: they differ in the inputs",
    ),
    "other_shape": (
        lambda d: edit(d / "manifest.json", lambda c: c["graphs"]["gradients"]["inputs"][0].update(shape=["b", 21])),
        ValueError, "does not describe gradients.onnx: they differ in the inputs 'x'",
    ),
    "other_optimizer": (
        lambda d: edit(d / "manifest.json", lambda c: c["optimizer"].update(weight_decay=0.2)), ValueError,
        "does not describe train_step.onnx: they differ in the optimizer",
    ),
    "other_parameter": (
        lambda d: edit(d / "manifest.json", lambda c: c["parameters"][0].update(shape=[3])), ValueError,
        "checkpoint does not belong to .* they differ in the parameters 'fc1.weight'",
    ),
    "other_trained": (
        lambda d: edit(d / "manifest.json", lambda c: c["parameters"][0].update(trained=True)), ValueError,
        r"they differ in what is trained \(fc1.weight\)",
    ),
    "incomplete_manifest": (
        lambda d: edit(d / "manifest.json", lambda c: c.pop("buffers")), ValueError, "no complete manifest",
    ),
    "truncated_manifest": (
        lambda d: (d / "manifest.json").write_text((d / "manifest.json").read_text()[:500]), ValueError,
        "no manifest of artifacts, or a damaged one",
    ),
    "outside": (
        lambda d: edit(d / "manifest.json", lambda c: c["graphs"]["gradients"].update(file="../gradients.onnx")),
        ValueError, "no complete manifest",
    ),
    "newer": (lambda d: edit(d / "manifest.json", lambda c: c.update(version=2)), ValueError, "version 2; expected 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILED)
def test_files_that_do_not_fit_are_refused(artifacts, name):
    change, error, message = SPOILED[name]
    change(artifacts)
    with pytest.raises(error, match=message):
        opened(artifacts)


def test_states_of_another_optimizer_are_refused(written, tmp_path):
    state, module, optimizer = opened(written)
    module(*arrays())
    optimizer.step()
    state.training_state.optimizer.kind = "Lamb"
    before = state.parameters["fc3.bias"].data
    with pytest.raises(ValueError, match="holds the state of Lamb, but the optimizer artifact is AdamW"):
        Optimizer(written / "train_step.onnx", module)
    np.testing.assert_array_equal(state.parameters["fc3.bias"].data, before)


@pytest.mark.parametrize("name", ["loss", "output"])
def test_a_parameter_that_is_called_like_a_result_is_named(name, tmp_path):
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.register_parameter(name, nn.Parameter(torch.ones(())))

        def forward(self, x):
            return super().forward(x) * getattr(self, name)

    with pytest.raises(ValueError, match=f"'{name}': a result is called like an input or a parameter"):
        generate_artifacts(Scaled(), tmp_path, inputs=(torch.randn(4, 6), torch.randn(4, 3)), loss="MSELoss")


def test_a_name_in_the_place_of_a_list(written, tmp_path):
    _, module, _ = opened(written)
    with pytest.raises(TypeError, match=r"graph_output_names='output' is one name: expected a list"):
        module.export_model_for_inferencing(tmp_path / "x.onnx", "output")
