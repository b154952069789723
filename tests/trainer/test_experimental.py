"""The gradient graph of a torch module, as ``onnxruntime.training.experimental`` writes it."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from lightning_ort.errors import MismatchError
from lightning_ort.experimental import export_gradient_graph
from lightning_ort.ondevice.generation.step_graphs import gradient_graph


class Network(nn.Module):
    """With a layer that is not trained, a parameter without a use, and statistics that a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(10, 20, bias=False).requires_grad_(False)
        self.fc1, self.norm, self.fc2 = nn.Linear(20, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.norm(self.fc1(self.frozen(x)))))


def logistic(output: Tensor, target: Tensor) -> Tensor:
    chances = output.softmax(1)
    return -torch.sum(target * torch.log2(chances[:, 0]) + (1 - target) * torch.log2(chances[:, 1]))


@pytest.mark.parametrize("loss_fn", [logistic, nn.CrossEntropyLoss()])
def test_graph_computes_outputs_loss_and_gradients(tmp_path, loss_fn):
    torch.manual_seed(0)
    model, x, y = Network(), torch.randn(4, 10, requires_grad=True), torch.tensor([1, 0, 1, 1])
    before = copy.deepcopy(model.state_dict())
    export_gradient_graph(model, loss_fn, x, y, tmp_path / "g.onnx")
    assert model.training and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

    onnx.checker.check_model(onnx.load(tmp_path / "g.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "g.onnx", providers=["CPUExecutionProvider"])
    parameters = dict(model.named_parameters())
    assert [i.name for i in session.get_inputs()] == ["input", "labels", *parameters]
    names = [o.name for o in session.get_outputs()]
    trained = [n for n, p in parameters.items() if p.requires_grad]
    assert sorted(names) == sorted(["output", "loss", *(f"{n}_grad" for n in trained)])
    # another batch, and other weights
    x, y = torch.randn(7, 10), torch.randint(0, 2, (7,))
    with torch.no_grad():
        model.fc1.weight.mul_(2)
    feed = {"input": x, "labels": y, **parameters}
    got = dict(zip(names, session.run(None, {n: t.detach().numpy() for n, t in feed.items()}), strict=True))
    output = model(x)
    loss = loss_fn(output, y)
    loss.backward()
    np.testing.assert_allclose(got["output"], output.detach(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(got["loss"], loss.detach(), rtol=1e-6)
    for name in trained:
        expected = torch.zeros(3) if name == "unused" else parameters[name].grad
        np.testing.assert_allclose(got[f"{name}_grad"], expected, rtol=0, atol=1e-5)


class Noisy(nn.Module):
    """Draws, and has a weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(self.first(x)))


def test_random_steps_draw_and_leave_torchs_generator_and_the_module_alone(tmp_path):
    torch.manual_seed(0)
    model, loss_fn = Noisy().eval(), nn.MSELoss().eval()
    before = torch.get_rng_state()
    export_gradient_graph(model, loss_fn, torch.ones(1, 6), torch.ones(1, 6), tmp_path / "g.onnx")
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training and not model.drop.training and not loss_fn.training

    session = onnxruntime.InferenceSession(tmp_path / "g.onnx", providers=["CPUExecutionProvider"])
    parameters = {n: p.detach().numpy() for n, p in model.named_parameters()}
    x, y = torch.randn(5, 6).numpy(), torch.randn(5, 6).numpy()
    names = ["output", "loss", "second.bias_grad"]
    results = [dict(zip(names, session.run(names, {"input": x, "labels": y, **parameters}), strict=True)) for _ in "12"]
    assert not np.array_equal(results[0]["output"], results[1]["output"])
    for got in results:
        np.testing.assert_allclose(got["loss"], np.square(got["output"] - y).mean(), rtol=1e-5)
        wanted = 2 * (got["output"] - y).sum(0) / y.size
        np.testing.assert_allclose(got["second.bias_grad"], wanted, rtol=1e-4, atol=1e-6)


def test_losses_that_are_not_finite_for_the_example_are_written_unchecked(tmp_path):
    model = nn.Linear(2, 1)
    export_gradient_graph(model, lambda o, y: (o * 0).log().sum() * y.sum(), torch.ones(2, 2), torch.ones(2),
                          tmp_path / "g.onnx")  # fmt: skip
    assert (tmp_path / "g.onnx").exists()


def test_wrong_gradients_are_not_written(tmp_path, monkeypatch):
    def of_another_loss(forward, *args):
        right, forward.objective.loss_fn = forward.objective.loss_fn, nn.L1Loss()
        try:
            return gradient_graph(forward, *args)
        finally:
            forward.objective.loss_fn = right

    monkeypatch.setattr("lightning_ort.experimental.gradient_graph", of_another_loss)
    with pytest.raises(MismatchError, match="loss"):
        export_gradient_graph(nn.Linear(3, 3), nn.MSELoss(), torch.randn(3, 3), torch.randn(3, 3), tmp_path / "g.onnx")
    assert not (tmp_path / "g.onnx").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": 3}, "model=3: expected a torch.nn.Module"),
        ({"loss_fn": None}, "loss_fn=None: expected a function"),
        ({"example_labels": [1]}, r"example_labels=\[1\] \(a list\): expected a torch.Tensor"),
        ({"gradient_graph_path": ""}, "gradient_graph_path='': expected the path"),
        ({"opset_version": 11}, "opset_version=11: expected an integer from 12 to 20"),
        ({"model": nn.Linear(2, 2).requires_grad_(False)}, "No parameter of Linear requires a gradient"),
        (
            {
                "loss_fn": nn.CrossEntropyLoss(reduction="none"),
                "example_input": torch.ones(2, 2),
                "example_labels": torch.ones(2, dtype=torch.int64),
            },
            r"result is torch.float32 of shape \(2,\)",
        ),
        ({"model": nn.RNN(2, 2), "example_input": torch.ones(3, 1, 2)}, "1 names for the 2 results of the model"),
        ({"example_input": torch.ones(1, 3)}, "shapes cannot be multiplied"),
    ],
)
def test_wrong_arguments(tmp_path, changed, message):
    arguments = {
        "model": nn.Linear(2, 2), "loss_fn": nn.CrossEntropyLoss(), "example_input": torch.ones(1, 2),
        "example_labels": torch.ones(1, dtype=torch.int64), "gradient_graph_path": tmp_path / "g.onnx",
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        export_gradient_graph(**{**arguments, **changed})
    assert not (tmp_path / "g.onnx").exists()
