"""ONNX files that ORTTrainer writes."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from orttrainer_models import ADAM, LAMB, SGD, batches, cross_entropy, description, make, options, trainer
from torch import nn

from lightning_ort import ExportError, MismatchError, ORTTrainer

X, LABEL = batches(count=1)[0]


def run(path, names=None, **feed):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(names, {k: v.numpy() for k, v in feed.items()})


def test_saved_model_computes_outputs_of_the_present_weights(tmp_path):
    found = trainer()
    path = tmp_path / "m.onnx"
    with pytest.warns(UserWarning, match="Training session is not initialized yet"):
        found.save_as_onnx(str(path))
    assert not path.exists()
    for x, label in batches(count=2):
        found.train_step(x, label)
    found.save_as_onnx(str(path))
    model = onnx.load(path)
    assert [i.name for i in model.graph.input] == ["x", "label"]
    assert [o.name for o in model.graph.output] == ["loss", "logits"]
    assert {i.name for i in model.graph.initializer} >= {n for n, _ in make().named_parameters()}
    assert next(o.version for o in model.opset_import if not o.domain) == 14
    loss, logits = run(path, x=X[:7], label=LABEL[:7])
    expected = found.eval_step(X[:7], LABEL[:7])
    np.testing.assert_allclose(loss, expected[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(logits, expected[1], rtol=0, atol=1e-5)
    with pytest.raises(AssertionError, match="'path' must be a valid path string"):
        found.save_as_onnx(3)
    for wrong in ("", str(tmp_path / "none" / "m.onnx")):
        with pytest.raises(ValueError, match="'path' is not valid or does not exist"):
            found.save_as_onnx(wrong)
    with pytest.raises(ValueError, match=r"^'path' is not valid, it is a folder: .*\. Name a file in it\.$"):
        found.save_as_onnx(tmp_path)


def test_trainer_of_an_onnx_model_saves_it_before_the_first_step(tmp_path):
    first = trainer()
    first.train_step(X, LABEL)
    first.save_as_onnx(str(tmp_path / "first.onnx"))
    second = ORTTrainer(onnx.load(tmp_path / "first.onnx"), description(), SGD(), options=options())
    state = second.state_dict()
    state["model"]["full_precision"]["fc3.bias"] += 1
    second.load_state_dict(state)
    second.save_as_onnx(str(tmp_path / "second.onnx"))

    loss, logits = run(tmp_path / "second.onnx", x=X[:7], label=LABEL[:7])
    expected = second.eval_step(X[:7], LABEL[:7])
    np.testing.assert_allclose(loss, expected[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(logits, expected[1], rtol=0, atol=1e-5)


class Activated(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(20, 10), nn.GELU())


def saved(tmp_path, module=None, **sections):
    path = tmp_path / "m.onnx"
    description = {
        "inputs": [("input", ["b", 20]), ("label", ["b"])],
        "outputs": [("loss", [], True), ("y", ["b", 10])],
    }
    found = ORTTrainer(module or Activated(), description, ADAM(), cross_entropy, options(**sections))
    found.train_step(X, LABEL)
    found.save_as_onnx(str(path))
    return onnx.load(path)


class Sampled(Activated):
    """With an operator that came with opset 16, and that ONNX Runtime has as one of its own."""

    def forward(self, x):
        image = super().forward(x)[:, None, None, :]
        grid = torch.zeros(len(x), 1, 10, 2)
        return torch.nn.functional.grid_sample(image, grid, align_corners=False)[:, 0, 0]


def test_options_of_the_export(tmp_path):
    plain = saved(tmp_path, _internal_use={"enable_onnx_contrib_ops": False, "onnx_opset_version": 12})
    assert [(o.domain, o.version) for o in plain.opset_import] == [("", 12)]
    shaped = saved(tmp_path, utils={"run_symbolic_shape_infer": True})
    known = {v.name for v in shaped.graph.value_info}
    assert known >= {name for node in shaped.graph.node for name in node.output} - {"loss", "y"}
    own = saved(tmp_path, module=Sampled(), debug={"check_model_export": True})
    assert [n.op_type for n in own.graph.node if n.domain == "com.microsoft"] == ["GridSample"]
    with pytest.raises(ExportError, match=r"ONNX opset 14 cannot express this model: GridSample came with opset 16\."):
        saved(tmp_path, module=Sampled(), _internal_use={"enable_onnx_contrib_ops": False})


class Equal(nn.Module):
    """Weights that are equal, or that an exporter would transpose or merge; sizes that are computed."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.wide = nn.LayerNorm(5), nn.LayerNorm(5), nn.Linear(5, 5)
        self.norm, self.conv, self.last = nn.BatchNorm1d(4), nn.Conv1d(4, 4, 3, padding=1), nn.Linear(20, 10)

    def forward(self, x):
        h = self.second(self.wide(self.first(x.view(len(x), 4, 5))))
        return self.last(self.norm(self.conv(h)).softmax(1).flatten(1)) * 0.5


@pytest.mark.parametrize("opset", [12, 14])
def test_each_weight_is_an_initializer_of_its_name_and_nothing_else_is_one(tmp_path, opset):
    module = Equal()
    model = saved(tmp_path, module=module, _internal_use={"onnx_opset_version": opset})
    onnx.checker.check_model(model, full_check=True)
    assert model.ir_version == 7 and [(o.domain, o.version) for o in model.opset_import] == [("", opset)]
    stored = {i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer}
    assert stored.keys() == module.state_dict().keys() - {"norm.num_batches_tracked"}
    assert all(np.array_equal(stored[name], module.state_dict()[name]) for name in stored)
    module.eval()
    for n in (1, 2, len(X)):
        (y,) = run(tmp_path / "m.onnx", ["y"], input=X[:n], label=LABEL[:n])
        np.testing.assert_allclose(y, module(X[:n]).detach(), rtol=0, atol=1e-6)


class Tied(nn.Module):
    """Layers and buffers with two names, and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.wide, self.back, self.last = nn.Linear(20, 6, bias=False), nn.Linear(6, 6), nn.Linear(20, 10)
        self.again, self.narrow = self.back, self.wide.weight
        self.register_buffer("scale", torch.rand(6))
        self.register_buffer("same_scale", self.scale)

    def forward(self, x):
        h = self.again(self.back(self.wide(x)).tanh() * self.same_scale)
        return self.last(h @ self.narrow)


def test_what_has_two_names_is_an_initializer_of_the_first(tmp_path):
    module = Tied()
    model = saved(tmp_path, module=module)
    stored = {i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer}
    expected = {name: x.detach() for name, x in [*module.named_parameters(), *module.named_buffers()]}
    assert stored.keys() == expected.keys()
    assert all(np.array_equal(stored[name], x) for name, x in expected.items())
    (y,) = run(tmp_path / "m.onnx", ["y"], input=X, label=LABEL)
    np.testing.assert_allclose(y, module(X).detach(), rtol=0, atol=1e-6)


def test_a_model_that_takes_a_named_size_for_a_number_is_refused(tmp_path):
    class Fixed(Activated):
        def forward(self, x):
            return super().forward(x.reshape(len(X), 20))

    refused = r"torch.export cannot trace Fixed with the open sizes .*'b'.* must be a number in model_desc"
    with pytest.raises(ExportError, match=refused):
        saved(tmp_path, module=Fixed())
    assert not list(tmp_path.iterdir())


def spoil(monkeypatch, name):
    """Have models exported with another bias."""
    from lightning_ort.trainer import trainer as module

    original = module.export

    def broken(*args):
        model = original(*args)
        model.graph.initializers[name].const_value = ir.tensor(np.full(10, 9, np.float32), name=name)
        return model

    monkeypatch.setattr(module, "export", broken)


def test_check_of_the_export_passes_and_finds_differences(monkeypatch):
    trainer(debug={"check_model_export": True}).train_step(X, LABEL)
    spoil(monkeypatch, "fc3.bias")
    found = trainer(debug={"check_model_export": True})
    with pytest.raises(RuntimeError, match="The exported model gives another 'loss' than the module"):
        found.train_step(X, LABEL)
    assert found._train_step_info.step == 0


def test_a_file_with_other_results_does_not_appear(tmp_path, monkeypatch):
    spoil(monkeypatch, "0.bias")
    with pytest.raises(MismatchError, match="The exported model gives another 'loss' than the module"):
        saved(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_model_that_gives_something_else_each_time_has_a_file(tmp_path):
    class Sampling(Activated):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5, training=True)

    saved(tmp_path, module=Sampling())
    run(tmp_path / "m.onnx", input=X, label=LABEL)


@pytest.mark.filterwarnings("ignore:aten.* runs in torch")
def test_a_model_that_onnx_runtime_has_no_kernels_for_is_refused(tmp_path):
    description = {
        "inputs": [("input", ["b", 20]), ("label", ["b"])],
        "outputs": [("loss", [], True), ("y", ["b", 10])],
    }
    found = ORTTrainer(Activated().double(), description, ADAM(), cross_entropy, options())
    found.train_step(X.double(), LABEL)
    with pytest.raises(ExportError, match=r"does not load the exported model: .* a module of float32 \(module"):
        found.save_as_onnx(str(tmp_path / "m.onnx"))
    assert not list(tmp_path.iterdir())


WEIGHTS = torch.arange(1.0, 11.0)


@pytest.mark.parametrize("options_of_loss", [{}, {"weight": WEIGHTS}, {"reduction": "sum"}], ids=str)
@pytest.mark.parametrize("soft", [False, True])
def test_label_smoothing_and_probabilities_for_labels(tmp_path, options_of_loss, soft):
    """Torch's exporter leaves the former out, and takes the latter for class numbers."""
    label = torch.rand(len(X), 10).softmax(1) if soft else LABEL
    description = {
        "inputs": [("input", ["b", 20]), ("label", ["b", 10] if soft else ["b"])],
        "outputs": [("loss", [], True), ("y", ["b", 10])],
    }

    def loss(y, label):
        return nn.functional.cross_entropy(y, label, label_smoothing=0.2, **options_of_loss)

    module = Activated()
    found = ORTTrainer(module, description, ADAM(), loss, options())
    found.train_step(X, label)
    found.save_as_onnx(str(tmp_path / "m.onnx"))
    for n in (1, 5, len(X)):
        (got,) = run(tmp_path / "m.onnx", ["loss"], input=X[:n], label=label[:n])
        np.testing.assert_allclose(got, loss(module(X[:n]), label[:n]).detach(), rtol=1e-5)


def test_weights_of_more_than_2_gb_lie_beside_the_file(tmp_path, monkeypatch):
    whole = saved(tmp_path)
    monkeypatch.setattr("lightning_ort.files.onnx_models.LARGEST_FILE", 100)
    apart = saved(tmp_path, debug={"check_model_export": True})
    (data,) = tmp_path.glob("m.*.data")
    assert data.stat().st_size >= 4 * 210
    assert [n.op_type for n in apart.graph.node] == [n.op_type for n in whole.graph.node]
    assert [v.name for v in apart.graph.input] == ["input", "label"]
    assert {i.name for i in apart.graph.initializer} == {"0.weight", "0.bias"}
    module = Activated()
    module.load_state_dict({i.name: torch.tensor(onnx.numpy_helper.to_array(i)) for i in apart.graph.initializer})
    y = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(["y"], {"input": X.numpy(), "label": LABEL.numpy()})[0]
    np.testing.assert_allclose(y, module(X).detach(), rtol=0, atol=1e-5)


PATHS = ["model_after_graph_transforms", "model_with_gradient_graph", "model_with_training_graph",
         "model_with_training_graph_after_optimization"]  # fmt: skip


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_graph_that_cannot_be_written_changes_nothing(tmp_path, error, monkeypatch):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(X.shape[1], 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    paths = {"model_with_gradient_graph_path": str(tmp_path / "g.onnx")}
    found = trainer(ADAM(lr=0.01), model=module, debug={"graph_save_paths": paths}, placement="onnxruntime")
    before = {k: v.clone() for k, v in found.state_dict(True).items()}
    with monkeypatch.context() as full:
        full.setattr("lightning_ort.trainer.debug.save", Mock(side_effect=error("the disk is full")))
        with pytest.raises(error):
            found.train_step(X, LABEL)
    assert all(torch.equal(torch.as_tensor(v), before[k]) for k, v in found.state_dict(True).items())
    assert not found._files._sessions
    found.train_step(X[:2], LABEL[:2])  # of another size, and so of a session of its own, which nobody keeps
    assert not found._files._sessions


@pytest.mark.parametrize("config", [ADAM(lr=0.01, lambda_coef=0.1), LAMB(lr=0.01)], ids=lambda c: c.name)
def test_graphs_of_the_first_step(tmp_path, config):
    paths = {f"{name}_path": str(tmp_path / f"{name}.onnx") for name in PATHS}
    found = trainer(config, debug={"graph_save_paths": paths}, placement="onnxruntime")
    before = {k: v.clone() for k, v in found.state_dict(True).items()}
    found.train_step(X, LABEL)
    assert sorted(p.stem for p in tmp_path.iterdir()) == sorted(PATHS)
    gradient = onnx.load(tmp_path / "model_with_gradient_graph.onnx")
    names = {f"{n}_grad" for n in before}
    assert {o.name for o in gradient.graph.output} == {"loss", "logits", *names}
    assert {i.name for i in gradient.graph.input} == {"x", "label", *before}
    training = onnx.load(tmp_path / "model_with_training_graph.onnx")
    onnx.checker.check_model(training)
    # the written graph is the one that trains: it gives the weights of the first step
    feed = {**before, "x": X, "label": LABEL}
    update = found._optimizer.updater._update
    slots = dict(zip([i.name for i in training.graph.input], training.graph.input, strict=True))
    for name, value in slots.items():
        if "/Moment_" in name:
            feed[name] = torch.zeros([d.dim_value for d in value.type.tensor_type.shape.dim])
        elif name.startswith(("update/scale", "update/limit")):
            feed[name] = torch.tensor(1.0)
    coefficients = [name for name in slots if name.startswith("update/coefficient")]
    order = sorted(coefficients, key=lambda n: int(n.rsplit("_", 1)[1]))
    feed |= dict(zip(order, update.coefficients[0], strict=True))
    outputs = [f"{n}_updated" for n in before]
    got = run(tmp_path / "model_with_training_graph_after_optimization.onnx", outputs, **feed)
    for name, value in zip(before, got, strict=True):
        np.testing.assert_allclose(value, found.state_dict(True)[name], rtol=0, atol=1e-6)
