"""Networks that ONNX Runtime's own classes train on our artifacts as torch does, running statistics included."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from ondevice_models import rewritten
from ondevice_networks import NETWORKS, ConvNet
from ondevice_wheel import DATA, WHEEL, WheelTraining, needs_wheel
from torch import Tensor, nn

from lightning_ort import UnsupportedError
from lightning_ort.ondevice import CheckpointState, Module, Optimizer, OptimizerConfig, generate_artifacts


def artifacts(network: nn.Module, folder: Path, inputs, loss, **options) -> Path:
    generate_artifacts(
        network,
        folder,
        inputs=inputs,
        loss=loss,
        flavour="ort-training",
        verify=False,
        output_names=["result"],
        **options,
    )
    return folder


def opened(folder: Path, checkpoint: Path | None = None) -> tuple[CheckpointState, Module, Optimizer]:
    state = CheckpointState.load_checkpoint(checkpoint or folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    return state, module, Optimizer(folder / "optimizer_model.onnx", module)


@needs_wheel
@pytest.mark.parametrize("name", NETWORKS)
def test_training_is_that_of_torch(name, tmp_path):
    kind, batch, loss, _ = NETWORKS[name]
    torch.manual_seed(0)
    network, data = kind(), [batch(6) for _ in range(20)]
    # Adam would make steps of gradients that are zero up to rounding: those of the bias of attention's keys
    config = OptimizerConfig("SGD", 0.05, momentum=0.9)
    artifacts(network, tmp_path, data[0], loss, optimizer=config, dynamic_axes={})
    training = WheelTraining(tmp_path)
    training.optimizer.set_learning_rate(0.05)
    reference = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    function = F.mse_loss if loss == "MSELoss" else F.cross_entropy
    for x, y in data:
        value = function(network(x), y)
        reference.zero_grad()
        value.backward()
        reference.step()
        np.testing.assert_allclose(training.step(x.numpy(), y.numpy()), value.item(), rtol=0, atol=1e-5)
    found, expected = training.data(), dict(network.state_dict())
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value.numpy(), rtol=1e-4, atol=2e-5, err_msg=key)
    network.eval()
    x, y = data[0]
    with torch.no_grad():
        result = network(x)
    np.testing.assert_allclose(training.evaluate(x.numpy(), y.numpy()), function(result, y), rtol=0, atol=1e-5)
    training.module.export_model_for_inferencing(str(tmp_path / "inference.onnx"), ["result"])
    session = onnxruntime.InferenceSession(tmp_path / "inference.onnx", providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(got, result, rtol=0, atol=1e-4)


class Dropped(nn.Module):
    """The loss is the sum of its weights times their gradients, if both see the same mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 4000))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.weight, 0.3, self.training).sum()


def test_dropout_is_on_in_training_only(tmp_path):
    torch.manual_seed(0)
    folder = artifacts(Dropped(), tmp_path, (torch.ones(1, 4000),), None, dynamic_axes={})
    x, total = np.ones((1, 4000), dtype=np.float32), float(torch.linspace(1, 2, 4000).sum())

    def check(train, gradient, evaluate) -> None:
        seen = []
        for _ in range(2):
            loss, g = train(), gradient()
            assert abs(float(loss) - float((np.linspace(1, 2, 4000) * g).sum())) < 1e-3 * total
            assert set(np.unique(g)) == {np.float32(0), np.float32(1 / 0.7)}
            assert abs((g == 0).mean() - 0.3) < 0.04
            seen.append(float(loss))
        assert seen[0] != seen[1]
        np.testing.assert_allclose(evaluate(), total, rtol=1e-6)

    state, module, _ = opened(folder)

    def ours() -> np.ndarray:
        module.lazy_reset_grad()
        return module.train()(x)

    check(ours, lambda: state.parameters["weight"].grad, lambda: module.eval()(x))
    if WHEEL:
        wheel = WheelTraining(folder)

        def theirs() -> np.ndarray:
            wheel.module.lazy_reset_grad()
            wheel.module.train()
            return wheel.module(x)

        check(theirs, lambda: dict(wheel.state.parameters)["weight"].grad, lambda: wheel.evaluate(x))


def test_the_graphs_need_nothing_but_the_accumulator(tmp_path):
    torch.manual_seed(0)
    _, batch, loss, _ = NETWORKS["convnet"]
    network = ConvNet()
    network.conv1.requires_grad_(False)
    folder = artifacts(network, tmp_path, batch(4), loss, optimizer=OptimizerConfig("SGD", 0.1))
    model = onnx.load(folder / "training_model.onnx")
    assert {n.op_type for n in model.graph.node if n.domain} == {"InPlaceAccumulatorV2"}
    assert model.ir_version <= 10 and {i.domain: i.version for i in model.opset_import}[""] <= 21
    trained = [n for n, p in network.named_parameters() if p.requires_grad]
    names = [i.name for i in model.graph.input]
    assert names[:2] == ["x", "labels"] and names[-1] == "lazy_reset_grad"
    assert [n for n in names if n.endswith(".buffer")] == [f"{n}_grad.accumulation.buffer" for n in trained]
    evaluation = onnx.load(folder / "eval_model.onnx")
    buffers = [n for n in names[2:] if n in network.state_dict()]
    assert [i.name for i in evaluation.graph.input] == ["x", "labels", *buffers] and len(buffers) == 14
    assert not [n for n in evaluation.graph.node if n.domain]
    assert sorted(p.name for p in folder.iterdir()) == [
        "checkpoint", "eval_model.onnx", "optimizer_model.onnx", "training_model.onnx",
    ]  # fmt: skip

    state, module, optimizer = opened(folder)
    before = {n: p.data for n, p in state.parameters}
    x, y = batch(4)
    module(x, y)
    optimizer.step()
    assert np.array_equal(state.parameters["conv1.weight"].data, before["conv1.weight"])
    assert not np.array_equal(state.parameters["conv2.weight"].data, before["conv2.weight"])
    assert state.training_state.buffers["norm2.num_batches_tracked"] == 1
    if WHEEL:
        # the same parameters in the same order, running statistics among them
        wheel = WheelTraining(folder)
        wheel.optimizer.set_learning_rate(0.1)
        wheel.step(x.numpy(), y.numpy())
        for trainable_only in (True, False):
            theirs = wheel.module.get_contiguous_parameters(trainable_only)
            ours = module.get_contiguous_parameters(trainable_only)
            np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=0, atol=1e-6)
            assert module.get_parameters_size(trainable_only) == wheel.module.get_parameters_size(trainable_only)


def test_nominal_checkpoints_are_completed_by_a_buffer(tmp_path):
    folder = DATA / "wheel_mlp"
    _, complete, _ = opened(folder)
    state, module, optimizer = opened(folder, folder / "nominal_checkpoint")
    x, y = np.zeros((2, 20), dtype=np.float32), np.array([0, 1])
    for use in (lambda: module(x, y), module.get_contiguous_parameters, lambda: state.parameters["fc1.bias"].data):
        with pytest.raises(RuntimeError, match="no values yet: the checkpoint is a nominal one"):
            use()
    with pytest.raises(ValueError, match="give them with trainable_only=False"):
        module.copy_buffer_to_parameters(complete.get_contiguous_parameters(True), True)
    module.copy_buffer_to_parameters(complete.get_contiguous_parameters(False), False)
    assert module(x, y) == complete(x, y)
    optimizer.step()


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def test_what_the_api_cannot_train_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match=r"'layer\.weight' is DOUBLE; .*flavour='portable'"):
        artifacts(Double(), tmp_path / "d", (torch.ones(2, 3, dtype=torch.float64),), None)
    assert list((tmp_path / "d").iterdir()) == []
    state = CheckpointState.load_checkpoint(DATA / "wheel_mlp" / "checkpoint")
    with pytest.raises(ValueError, match=r"accumulates into 'conv\.weight_grad.*same artifacts"):
        Module(DATA / "wheel_cnn" / "training_model.onnx", state)
    with pytest.raises(ValueError, match=r"computes no gradient of fc1.bias, .*training model of these artifacts"):
        Module(DATA / "wheel_mlp" / "eval_model.onnx", state)
    model = onnx.load(DATA / "wheel_mlp" / "training_model.onnx")
    (relu, *_) = [n for n in model.graph.node if n.op_type == "Relu"]
    relu.op_type, relu.domain = "BiasGelu", "com.microsoft"
    onnx.save(model, tmp_path / "training_model.onnx")
    with pytest.raises(
        UnsupportedError, match=r"training_model.onnx': .*\n.*com\.microsoft\.BiasGelu \(node '/Relu'\)"
    ):
        Module(tmp_path / "training_model.onnx", state)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.w_grad = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w + self.w_grad).square().mean()


class Reserved(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)

    def forward(self, lazy_reset_grad: Tensor) -> Tensor:
        return super().forward(lazy_reset_grad).square().mean()


def test_names_that_mean_something_else_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^Parameter 'w_grad' is called like the gradient of 'w'. Rename it"):
        artifacts(Named(), tmp_path, (torch.ones(2, 3),), None)
    with pytest.raises(ValueError, match=r"^Input 'lazy_reset_grad' is called like"):
        artifacts(Reserved(), tmp_path, (torch.ones(2, 3),), None)
    assert list(tmp_path.iterdir()) == []


class Tied(nn.Module):
    """A layer that is used twice, one that is frozen, a scalar and a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, 4).requires_grad_(False)
        self.scale, self.unused = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(3))
        self.other = self.layer

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scale * self.other(torch.tanh(self.layer(x))))


@needs_wheel
def test_weighted_means_and_unusual_parameters(tmp_path):
    torch.manual_seed(0)
    network, x, y = Tied(), torch.randn(6, 5), torch.randint(0, 4, (6,))
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 0.2, 0.3, 0.4]))
    folder = artifacts(network, tmp_path, (x, y), loss, optimizer=OptimizerConfig("SGD", 0.1))
    training = WheelTraining(folder)
    training.optimizer.set_learning_rate(0.1)
    reference = torch.optim.SGD(network.parameters(), 0.1)
    for _ in range(5):
        value = loss(network(x), y)
        reference.zero_grad()
        value.backward()
        reference.step()
        np.testing.assert_allclose(training.step(x.numpy(), y.numpy()), value.item(), rtol=0, atol=1e-6)
    for name, parameter in network.named_parameters():
        np.testing.assert_allclose(training.data()[name], parameter.detach().numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("config", [
    OptimizerConfig("AdamW", 0.01, weight_decay=0.1), OptimizerConfig("Adam", 0.01, eps=1e-4),
    OptimizerConfig("AdamW", 0.01, decay="after", eps=1e-4), OptimizerConfig("AdamW", 0.01, clip_grad_norm=0.5),
], ids=["adamw", "adam", "after", "clipped"])  # fmt: skip
def test_large_updates_are_those_of_torch(config, wide, tmp_path):
    network = copy.deepcopy(wide[0])
    folder = rewritten(wide[1], tmp_path, config, "ort-training")
    state, module, optimizer = opened(folder)
    kind = torch.optim.Adam if config.kind == "Adam" else torch.optim.AdamW
    # with another use of epsilon: after t updates it is divided by the correction of the second moment
    reference = kind(network.parameters(), 0.01, eps=config.eps, weight_decay=config.weight_decay)
    for t in range(1, 6):
        x, y = torch.randn(6, 5), torch.randint(0, 4, (6,))
        if config.decay == "after":
            reference.param_groups[0]["eps"] = config.eps / (1 - 0.999**t) ** 0.5
        loss = F.cross_entropy(network(x), y)
        reference.zero_grad()
        loss.backward()
        if config.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(network.parameters(), config.clip_grad_norm)
        reference.step()
        module.lazy_reset_grad()
        np.testing.assert_allclose(module(x.numpy(), y.numpy()), loss.item(), rtol=0, atol=1e-5)
        optimizer.step()
    for name, parameter in network.named_parameters():
        np.testing.assert_allclose(state.parameters[name].data, parameter.detach().numpy(), rtol=0, atol=1e-5)
    moments = state.training_state.optimizer.moments
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(
            moments[name]["moment_1"], reference.state[parameter]["exp_avg"], rtol=1e-4, atol=1e-6
        )


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 4))
    inputs = (torch.randn(6, 5), torch.randint(0, 4, (6,)))
    return network, generate_artifacts(
        network, tmp_path_factory.mktemp("wide"), inputs=inputs, loss="CrossEntropyLoss", flavour="ort-training",
        verify=False,
    )  # fmt: skip


def test_repeated_calls_give_what_single_ones_give(tmp_path):
    folder = DATA / "wheel_mlp"
    _, module, _ = opened(folder)
    random = np.random.default_rng(0)
    x, y = random.standard_normal((6, 20), dtype=np.float32), random.integers(0, 10, 6)
    batches = [(x, y), (x + 1, y), (np.asfortranarray(x - 1), y), (x[:4], y[:4]), (x[1:5], y[:4]), (x, y)]
    batches += [(torch.from_numpy(x), torch.from_numpy(y)), (x + 2, y)]
    results, gradients = [], []
    for a, b in batches:
        module.lazy_reset_grad()
        results.append(module(a, b))
        gradients.append(module.state.parameters["fc2.weight"].grad)
    for (a, b), result, gradient in zip(batches, results, gradients, strict=True):
        _, other, _ = opened(folder)
        # results are not overwritten by later calls
        np.testing.assert_array_equal(other(a, b), result)
        np.testing.assert_array_equal(other.state.parameters["fc2.weight"].grad, gradient)
    module.lazy_reset_grad()
    module(x, y)
    module(x + 1, y)
    np.testing.assert_allclose(
        module.state.parameters["fc2.weight"].grad, gradients[0] + gradients[1], rtol=0, atol=1e-6
    )
    with pytest.raises(ValueError, match=r"is torch\.float64; expected torch\.float32"):
        module(x.astype(np.float64), y)
    with pytest.raises(ValueError, match="takes 2 inputs"):
        module(x)
