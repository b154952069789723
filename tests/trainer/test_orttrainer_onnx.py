"""Training of an onnx.ModelProto."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from orttrainer_models import ADAM, batches, description, options, trainer
from torch import nn

from lightning_ort import ORTTrainer


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("onnx") / "m.onnx"
    found = trainer()
    found.eval_step(*batches(count=1)[0])
    found.save_as_onnx(str(path))
    return onnx.load(path)


def test_onnx_model_trains_as_its_module(exported):
    module = trainer(utils={"grad_norm_clip": False, "frozen_weights": ["fc1.bias"]})
    model = ORTTrainer(
        exported,
        description(),
        ADAM(lr=0.01),
        options=options(utils={"grad_norm_clip": False, "frozen_weights": ["fc1.bias"]}),
    )
    for x, label in batches(count=5):
        got, expected = model.train_step(x, label), module.train_step(x, label)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
    ours, theirs = model.state_dict(), module.state_dict()
    assert ours["optimizer"].keys() == theirs["optimizer"].keys()
    for name, value in theirs["model"]["full_precision"].items():
        np.testing.assert_allclose(ours["model"]["full_precision"][name], value, rtol=0, atol=2e-6)
    assert model.state_dict(pytorch_format=True).keys() == module.state_dict(pytorch_format=True).keys()
    model.load_state_dict(theirs)


class Named(nn.Module):
    """Parameters that are called as the exporter calls its values."""

    def __init__(self):
        super().__init__()
        self.mul, self.val_0 = nn.Parameter(torch.tensor(5.0)), nn.Parameter(torch.tensor(7.0))
        self.linear = nn.Parameter(torch.tensor(0.9))

    def forward(self, x):
        return (x * self.mul).clamp(-3.5, 3.5) * self.val_0 + x.pow(3.0) * self.linear


@pytest.mark.parametrize(("first", "result"), [("x", "output"), ("clamp", "pow_1")])
def test_names_that_the_exporter_gives_too(tmp_path, first, result):
    described = {"inputs": [(first, ["b", 3]), ("y", ["b"])], "outputs": [("loss", [], True), (result, ["b", 3])]}
    model = ORTTrainer(Named(), described, ADAM(), nn.CrossEntropyLoss(), options())
    x, y = torch.randn(4, 3), torch.randint(0, 3, (4,))
    model.train_step(x, y)
    model.save_as_onnx(str(tmp_path / "model.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    got = session.run(["loss", result], {first: x.numpy(), "y": y.numpy()})
    for a, b in zip(got, model.eval_step(x, y), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    stored = {i.name for i in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert stored == {"mul", "val_0", "linear"}


class Counting(nn.Linear):
    def forward(self, x):
        return super().forward(x) * len(x)  # a number of Python, unless torch traces with Dynamo


def test_a_size_that_python_counts_stays_open(tmp_path):
    described = {"inputs": [("x", ["b", 3]), ("y", ["b"])], "outputs": [("loss", [], True), ("output", ["b", 3])]}
    model = ORTTrainer(Counting(3, 3), described, ADAM(), nn.CrossEntropyLoss(), options())
    model.train_step(torch.randn(4, 3), torch.randint(0, 3, (4,)))
    model.save_as_onnx(str(tmp_path / "model.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    x, y = torch.randn(7, 3), torch.randint(0, 3, (7,))
    got = session.run(["loss"], {"x": x.numpy(), "y": y.numpy()})[0]
    np.testing.assert_allclose(got, model.eval_step(x, y)[0], rtol=1e-5)


def test_names_of_an_onnx_model_must_be_described(exported):
    wrong = {**description(), "inputs": [("x", ["b", 20]), ("y", ["b"])]}
    with pytest.raises(ValueError, match=r"has the inputs \['x', 'label'\], but model_desc describes \['x', 'y'\]"):
        ORTTrainer(exported, wrong, ADAM(), options=options())


def test_onnx_model_is_rewritten_before_training(exported):
    def rewrite(model):
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        bias = next(i for i in changed.graph.initializer if i.name == "fc3.bias")
        bias.CopyFrom(onnx.numpy_helper.from_array(np.full(10, 3, np.float32), "fc3.bias"))
        return changed

    found = ORTTrainer(exported, description(), ADAM(), options=options(_internal_use={"extra_postprocess": rewrite}))
    assert found.state_dict()["model"]["full_precision"]["fc3.bias"].tolist() == [3.0] * 10
