"""What artifacts can be made from, and what cannot be made."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import onnx.parser
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from ondevice_models import opened, train
from ondevice_wheel import needs_wheel
from orttrainer_models import batches, make
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_ort.errors import UnsupportedError
from lightning_ort.ondevice import OptimizerConfig, generate_artifacts
from lightning_ort.onnx_reader import to_torch

SGD = OptimizerConfig("SGD", 0.1, momentum=0.9)


class Classifier(LightningModule):
    """Logs, keeps a list, counts its steps and has a metric, as many do."""

    def __init__(self):
        super().__init__()
        self.net, self.accuracy = make(), MulticlassAccuracy(10)
        self.outputs, self.steps = [], 0

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        self.log("loss", loss, prog_bar=True)
        self.log("accuracy", self.accuracy(logits, y))
        self.outputs.append(loss.detach())
        self.steps += 1
        return {"loss": loss, "logits": logits}


def torch_losses(network, loss, data):
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        value = loss(network(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def test_a_training_step_is_traced_without_being_run(tmp_path):
    model, data = Classifier(), batches(count=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate_artifacts(model, tmp_path, inputs=data[0], optimizer=SGD)
    assert model.outputs == [] and model.steps == 0 and not model.accuracy.update_called
    _, module, optimizer = opened(tmp_path)
    assert module.input_names() == ["x", "target"]
    expected = torch_losses(model.net, lambda a, b: F.cross_entropy(a, b, label_smoothing=0.1), data)
    np.testing.assert_allclose(train(module, optimizer, data), expected, rtol=0, atol=1e-6)


def test_a_loss_that_depends_on_a_metric_is_found_out(tmp_path):
    class Weighted(Classifier):
        def training_step(self, batch, batch_idx):
            logits = self(batch[0])
            return F.cross_entropy(logits, batch[1]) * (1 + self.accuracy(logits, batch[1]))

    with pytest.raises(ValueError, match=r"the loss of the example is nan. A loss must not depend on a metric"):
        generate_artifacts(Weighted(), tmp_path / "none", inputs=batches()[0])
    assert not (tmp_path / "none").exists()


ONNX = """
<ir_version: 8, opset_import: ["": 17]>
g (float[batch, 20] x) => (float[batch, 10] logits)
<float[32, 20] w1, float[32] b1, float[10, 32] w2>
{
   h = Gemm<transB=1>(x, w1, b1)
   a = Relu(h)
   w2t = Transpose<perm=[1, 0]>(w2)
   logits = MatMul(a, w2t)
}
"""


@pytest.fixture(scope="module")
def onnx_model():
    graph = onnx.parser.parse_model(ONNX)
    rng = np.random.default_rng(0)
    del graph.graph.initializer[:]
    for name, shape in {"w1": (32, 20), "b1": (32,), "w2": (10, 32)}.items():
        array = rng.standard_normal(shape).astype(np.float32) * 0.2
        graph.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return graph


class Enum:
    """Members of onnxruntime.training.artifacts' enumerations have a name."""

    def __init__(self, name):
        self.name = name


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "inferred"])
def test_an_onnx_model_with_the_arguments_of_the_training_wheel(declared, onnx_model, tmp_path):
    given = onnx.ModelProto()
    given.CopyFrom(onnx_model)
    if not declared:  # the target has the shape of what it is compared with
        given.graph.output[0].type.tensor_type.ClearField("shape")
    generate_artifacts(
        given, requires_grad=["w1", "w2"], frozen_params=["b1"], loss=Enum("CrossEntropyLoss"),
        optimizer=SGD, artifact_directory=str(tmp_path), additional_output_names=["logits"],
    )  # fmt: skip
    weights = {i.name: torch.from_numpy(onnx.numpy_helper.to_array(i).copy()) for i in onnx_model.graph.initializer}
    network = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10, bias=False))
    network.load_state_dict({"0.weight": weights["w1"], "0.bias": weights["b1"], "2.weight": weights["w2"]})
    network[0].bias.requires_grad_(False)
    state, module, optimizer = opened(tmp_path)
    assert module.input_names() == ["x", "labels"] and module.output_names() == ["loss", "logits"]
    assert [(n, p.requires_grad) for n, p in state.parameters] == [("w1", True), ("b1", False), ("w2", True)]
    data = batches(count=5)
    expected = torch_losses(network, F.cross_entropy, data)
    np.testing.assert_allclose(train(module, optimizer, data), expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(state.parameters["b1"].data, weights["b1"])


def test_a_batch_normalization_of_an_onnx_model_trains_as_its_attribute_says(tmp_path):
    network = nn.Sequential(nn.Linear(20, 6), nn.BatchNorm1d(6), nn.Linear(6, 10))
    text = """
    <ir_version: 8, opset_import: ["": 17]>
    g (float[batch, 20] x) => (float[batch, 10] logits)
    <float[6, 20] w1, float[6] b1, float[6] s, float[6] o, float[6] mean, float[6] var, float[10, 6] w2, float[10] b2>
    {
       h = Gemm<transB=1>(x, w1, b1)
       n, m, v = BatchNormalization<training_mode=1, momentum=0.9>(h, s, o, mean, var)
       logits = Gemm<transB=1>(n, w2, b2)
    }
    """
    graph = onnx.parser.parse_model(text)
    del graph.graph.initializer[:]
    names = ["w1", "b1", "s", "o", "mean", "var", "w2", "b2"]
    tensors = [t for n, t in network.state_dict().items() if "num_batches" not in n]
    for name, tensor in zip(names, tensors, strict=True):
        graph.graph.initializer.append(onnx.numpy_helper.from_array(tensor.numpy().copy(), name))
    # running statistics that the training wheel wants to be listed are state here
    generate_artifacts(
        graph, tmp_path, loss="CrossEntropyLoss", requires_grad=[n for n in names if n not in ("mean", "var")],
        frozen_params=["mean", "var"], optimizer=SGD,
    )  # fmt: skip
    state, module, optimizer = opened(tmp_path)
    data = batches(count=5)
    expected = torch_losses(network, F.cross_entropy, data)
    np.testing.assert_allclose(train(module, optimizer, data), expected, rtol=0, atol=2e-5)
    buffers = state.training_state.buffers
    torch.testing.assert_close(buffers["mean"], network[1].running_mean, rtol=1e-4, atol=1e-5)
    x, y = data[0]
    loss = module.eval()(x, y)
    # ONNX moves the running variance by the biased variance of the batch, torch by the unbiased one
    assert (buffers["var"] / network[1].running_var - 1).abs().max() < 0.1
    network[1].running_var.copy_(buffers["var"])
    torch.testing.assert_close(loss, F.cross_entropy(network.eval()(x), y), rtol=0, atol=1e-4)


def test_a_model_may_return_its_loss(tmp_path):
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make()

        def forward(self, x, labels, weight=None):
            logits = self.net(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    model, data = Whole(), batches(count=3)
    generate_artifacts(model, tmp_path, inputs={"labels": data[0][1], "x": data[0][0]}, optimizer=SGD, prefix="m_")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "m_checkpoint.safetensors", "m_eval_step.onnx", "m_gradients.onnx", "m_manifest.json", "m_train_step.onnx",
        "m_update.onnx",
    ]  # fmt: skip
    (tmp_path / "m_checkpoint.safetensors").rename(tmp_path / "checkpoint.safetensors")
    from lightning_ort.ondevice import CheckpointState, Module, Optimizer

    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint.safetensors")
    module = Module(tmp_path / "m_train_step.onnx", state)
    optimizer = Optimizer(tmp_path / "m_update.onnx", module)
    assert module.input_names() == ["labels", "x"] and module.output_names() == ["loss", "logits"]
    got = train(module, optimizer, [(y, x) for x, y in data])
    np.testing.assert_allclose(got, torch_losses(model.net, F.cross_entropy, data), rtol=0, atol=1e-6)


def test_tied_weights_are_one_parameter_and_open_sizes_stay_open(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("positions", torch.arange(20)[:, None] / 20)

        def forward(self, tokens):
            return self.head(self.embedding(tokens) + self.positions[: tokens.shape[1]])

    torch.manual_seed(0)
    network = Tied()
    tokens = torch.randint(0, 12, (4, 9))

    def loss(logits, target):
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    axes = {n: {0: "batch", 1: "length"} for n in ("tokens", "target")}
    generate_artifacts(network, tmp_path, inputs=(tokens, tokens), loss=loss, optimizer=SGD, dynamic_axes=axes)
    state, module, optimizer = opened(tmp_path)
    assert [n for n, _ in state.parameters] == ["embedding.weight"]
    assert not state.training_state.buffers  # what does not change is a constant
    data = [(t, t) for t in (tokens, tokens[:, :5], tokens[:2])]
    np.testing.assert_allclose(train(module, optimizer, data), torch_losses(network, loss, data), rtol=0, atol=1e-6)


def test_a_size_that_is_left_out_of_dynamic_axes_is_told(tmp_path):
    inputs = {"input": torch.randn(6, 20), "target": torch.randint(0, 10, (6,))}
    network = nn.Sequential(nn.Linear(20, 10))
    options = {"inputs": inputs, "loss": "CrossEntropyLoss", "optimizer": SGD}
    with pytest.warns(UserWarning, match=r"'target' is not there, .* 6 for good, as many as 'n' .* add 'target'"):
        generate_artifacts(network, tmp_path / "a", dynamic_axes={"input": {0: "n"}}, **options)


def test_listed_dimensions_vary(tmp_path):
    network = nn.Linear(20, 10)
    inputs = {"input": torch.randn(6, 20), "target": torch.randint(0, 10, (6,))}
    axes = {"input": [0], "target": [0]}
    generate_artifacts(network, tmp_path, inputs=inputs, loss="CrossEntropyLoss", optimizer=SGD, dynamic_axes=axes)
    _, module, optimizer = opened(tmp_path)
    data = [(torch.randn(n, 20), torch.randint(0, 10, (n,))) for n in (6, 3, 17)]
    found = train(module, optimizer, data)
    np.testing.assert_allclose(found, torch_losses(network, F.cross_entropy, data), rtol=0, atol=1e-6)


def test_inputs_that_do_not_fit_each_other(tmp_path):
    inputs = {"input": torch.randn(16, 5), "target": torch.randn(16)}
    with pytest.raises(
        ValueError, match=r"^inputs: .* Their shapes are input \(16, 5\), target \(16,\); .* of the others"
    ):
        generate_artifacts(nn.Linear(5, 3), tmp_path / "a", inputs=inputs, loss="MSELoss", optimizer=SGD)
    assert not (tmp_path / "a").exists()


def tied():
    """Two layers with one weight, which has two names."""
    first, second = nn.Linear(20, 20), nn.Linear(20, 20)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


@pytest.mark.parametrize(("arguments", "trained"), [
    ({"requires_grad": ["2.weight", "2.bias"]}, ("0.weight", "2.bias")),
    ({"frozen_params": ["2.weight"]}, ("0.bias", "2.bias")),
], ids=["trained", "frozen"])  # fmt: skip
def test_every_name_of_a_tied_weight_is_its_name(arguments, trained, tmp_path):
    inputs = (torch.randn(4, 20), torch.randn(4, 20))
    found = generate_artifacts(tied(), tmp_path, inputs=inputs, loss="MSELoss", optimizer=SGD, **arguments)
    assert found.state.trained == trained and list(found.state.parameters) == ["0.weight", "0.bias", "2.bias"]


BAD = {
    "no_inputs": ({"loss": "MSELoss"}, ValueError, "inputs is missing: a module needs an example"),
    "no_target": ({"inputs": {"x": torch.zeros(2, 20)}, "loss": "MSELoss"}, ValueError, "no target for the loss"),
    "no_loss": ({"inputs": {"x": torch.zeros(2, 20), "y": torch.zeros(2)}}, ValueError, "y, which forward does not"),
    "names": ({"inputs": {"a": torch.zeros(2, 20)}, "loss": "MSELoss"}, ValueError, "has a, but forward takes x"),
    "loss": ({"loss": "Hinge"}, ValueError, "loss='Hinge': expected one of MSELoss, CrossEntropyLoss"),
    "loss_type": ({"loss": 3}, TypeError, "loss=3 is no loss function"),
    "scalar": (
        {"loss": nn.CrossEntropyLoss(reduction="none")}, UnsupportedError,
        r"^The loss function's result is torch.float32 of shape \(batch,\); expected one f.* number, such as a mean\.$",
    ),
    "optimizer": ({"optimizer": "Adagrad"}, ValueError, "optimizer='Adagrad': expected an OptimizerConfig, or one of"),
    "clip": ({"optimizer": None, "clip_grad_norm": 1.0}, ValueError, "clip_grad_norm was given without an optimizer"),
    "flavour": ({"flavour": "tflite"}, ValueError, "flavour='tflite': expected 'portable' or 'ort-training'"),
    "frozen": ({"frozen_params": ["fc9"]}, ValueError, "frozen_params: the model has no parameter 'fc9'. It has: fc1"),
    "both": (
        {"frozen_params": ["fc1.bias"], "requires_grad": ["fc1.bias"]}, ValueError,
        "both in requires_grad and in frozen_params",
    ),
    "buffer": (
        {"loss": "MSELoss", "model": nn.BatchNorm1d(20), "requires_grad": ["weight", "running_mean"],
         "inputs": (torch.ones(2, 20), torch.ones(2, 20))}, ValueError,
        "^requires_grad: 'running_mean' is a buffer, which no gradient trains. Expected some .*: weight, bias.$",
    ),
    "tied": (
        {"model": tied(), "requires_grad": ["0.weight"], "frozen_params": ["2.weight"]}, ValueError,
        r"^\['0.weight'\] are both in requires_grad and in frozen_params, where \['2.weight'\] name the same.$",
    ),
    "nothing": ({"requires_grad": [], "optimizer": "SGD"}, ValueError, "No parameter is trained"),
    "axes": ({"dynamic_axes": {"z": {0: "b"}}}, ValueError, "dynamic_axes: there is no input"),
    "dimension": ({"dynamic_axes": {"x": {2: "b"}}}, ValueError, "'x' has 2 dimensions, but not number 2"),
    "list": ({"dynamic_axes": [0]}, TypeError, r"dynamic_axes=\[0\] \(a list\): expected a mapping"),
    "number": ({"dynamic_axes": {"x": 0}}, TypeError, r"dynamic_axes\['x'\]=0: .*, or a list of dimensions"),
    "copy": (
        {"optimizer": torch.optim.SGD(make().parameters(), 0.1)}, ValueError,
        "^optimizer: its 6 parameters are not those of the model, perhaps those of a copy of it",
    ),
    "output": (
        {"additional_output_names": ["h"]}, UnsupportedError,
        r"^additional_output_names: there is no result 'h'; there are loss, output\.$",
    ),
    "outputs": (
        {"output_names": ["a", "b"]}, UnsupportedError, r"^output_names has 2 names for the 1 results of the model\.$",
    ),
    "ort_format": ({"ort_format": True}, UnsupportedError, r"ort_format=True.*convert_onnx_models_to_ort <artifact_d"),
    "library": (
        {"custom_op_library": "ops.so"}, UnsupportedError, "custom_op_library='ops.so': .* cannot be differentiated",
    ),
    "directory": ({"artifact_directory": ["x"]}, TypeError, "artifact_directory is a list; expected a path"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_together_is_refused(name, tmp_path):
    arguments, error, message = BAD[name]
    x, y = batches()[0]
    given = {"artifact_directory": tmp_path / "new", "loss": "CrossEntropyLoss", **arguments}
    if "inputs" not in arguments and name != "no_inputs":
        given["inputs"] = (x, y)
    if name == "no_loss":
        given["loss"] = None
    with pytest.raises(error, match=message):
        generate_artifacts(given.pop("model", None) or make(), **given)
    assert not (tmp_path / "new").exists()


@needs_wheel
def test_blocks_of_onnx_runtime_are_losses_and_build_models(onnx_model, tmp_path):
    from onnxruntime.training import onnxblock

    class Doubled(onnxblock.ForwardBlock):
        def __init__(self):
            super().__init__()
            self.loss, self.add = onnxblock.loss.CrossEntropyLoss(), onnxblock.blocks.Add()

        def build(self, output):
            loss = self.loss(output)
            return self.add(loss, loss)

    block = Doubled()
    with onnxblock.base(copy.deepcopy(onnx_model)):
        block("logits")
        built = block.to_model_proto()
    generate_artifacts(built, tmp_path / "built", optimizer=SGD)
    generate_artifacts(onnx_model, tmp_path / "loss", loss=Doubled(), loss_input_names=["logits"], optimizer=SGD)
    network = to_torch(onnx_model)
    expected = torch_losses(network, lambda outputs, y: 2 * F.cross_entropy(outputs[0], y), batches(count=5))
    for directory in (tmp_path / "built", tmp_path / "loss"):
        _, module, optimizer = opened(directory)
        np.testing.assert_allclose(train(module, optimizer, batches(count=5)), expected, rtol=0, atol=2e-5)


def test_an_operation_without_an_onnx_form_is_named(tmp_path):
    class Spectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return torch.fft.rfft(x * self.weight).abs()

    with pytest.raises(UnsupportedError, match=r"Spectrum|fft"):
        generate_artifacts(Spectrum(), tmp_path / "new", inputs=(torch.ones(2, 8), torch.ones(2, 5)), loss="MSELoss")
    assert not (tmp_path / "new").exists()
