"""Losses, training models and optimizers made of blocks, against torch and against ONNX Runtime's own blocks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from ondevice_wheel import WheelTraining, needs_wheel
from onnx_text import floats, parse
from torch import Tensor

from lightning_ort import UnsupportedError
from lightning_ort.ondevice import CheckpointState, Module, Optimizer, OptimizerConfig, generate_artifacts, onnxblock

FILES = {
    "portable": ("checkpoint.safetensors", "train_step.onnx", "eval_step.onnx", "train_step.onnx"),
    "ort-training": ("checkpoint", "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"),
}
WEIGHTS = ["w", "b", "v"]


def network() -> onnx.ModelProto:
    return parse(
        "g (float[N,6] x) => (float[M,3] y) { h = Gemm(x, w, b) t = Tanh(h) y = MatMul(t, v) }",
        opset=15, w=floats(6, 5), b=floats(5, seed=1), v=floats(5, 3, seed=2),
    )  # fmt: skip


def forward(weights: dict[str, Tensor], x: np.ndarray) -> Tensor:
    return torch.tanh(torch.from_numpy(x) @ weights["w"] + weights["b"]) @ weights["v"]


def leaves() -> dict[str, Tensor]:
    return {i.name: torch.from_numpy(onnx.numpy_helper.to_array(i).copy()) for i in network().graph.initializer}


def blocks_of(build: str) -> Any:
    return onnxblock if build == "ours" else importlib.import_module("onnxruntime.training.onnxblock")


def two_losses(ob: Any) -> Any:
    """A loss block as the examples of the training API write them, without ``super().__init__()``."""

    class TwoLosses(ob.Block):
        def __init__(self) -> None:
            self.temp_onnx_file_path = ""  # ONNX Runtime's class looks for it when it is collected
            self._squares, self._logits, self._add = ob.loss.MSELoss(), ob.loss.BCEWithLogitsLoss(), ob.blocks.Add()

        def build(self, y: str) -> str:
            return self._add(self._squares(y, target_name="t1"), self._logits(y, target_name="t2"))

    return TwoLosses()


BATCHES = [
    (floats(n, 6, seed=n), floats(n, 3, seed=n + 1), np.random.default_rng(n).random((n, 3), np.float32))
    for n in (4, 4, 7, 4)
]


def trained_in_torch() -> list[float]:
    weights = {n: t.requires_grad_() for n, t in leaves().items()}
    optimizer = torch.optim.SGD(weights.values(), 0.1)
    losses = []
    for x, t1, t2 in BATCHES:
        optimizer.zero_grad()
        y = forward(weights, x)
        loss = F.mse_loss(y, torch.from_numpy(t1)) + F.binary_cross_entropy_with_logits(y, torch.from_numpy(t2))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(directory: Path, flavour: str, rate: float | None = None, data: Any = BATCHES) -> tuple[list[float], Any]:
    checkpoint, train, evaluation, optimizer = FILES[flavour]
    state = CheckpointState.load_checkpoint(directory / checkpoint)
    module = Module(directory / train, state, directory / evaluation)
    update = Optimizer(directory / optimizer, module)
    if rate is not None:
        update.set_learning_rate(rate)
    losses = []
    for batch in data:
        result = module(*batch)
        losses.append(float(result[0] if isinstance(result, tuple) else result))
        update.step()
        module.lazy_reset_grad()
    return losses, module


@pytest.mark.parametrize("build", ["ours", pytest.param("wheel", marks=needs_wheel)])
@pytest.mark.parametrize("flavour", FILES)
def test_artifacts_of_a_custom_loss_train_as_torch(flavour: str, build: str, tmp_path: Path) -> None:
    ob = blocks_of(build)
    optimizer = ob.optim.SGD(clip_grad=ob.optim.ClipGradNorm(0.5))
    made = generate_artifacts(
        network(), tmp_path, loss=two_losses(ob), optimizer=optimizer, flavour=flavour, additional_output_names=["t"]
    )
    assert made.optimizer == OptimizerConfig("SGD", clip_grad_norm=0.5)
    assert list(made.state.parameters) == WEIGHTS and made.state.trained == tuple(WEIGHTS)
    assert made.inference is not None and made.inference.outputs == ("y",)
    assert [i.name for i in made.inference.inputs] == ["x"]
    losses, module = trained(tmp_path, flavour, 0.1)
    np.testing.assert_allclose(losses, trained_in_torch(), rtol=1e-5)
    assert module.input_names() == ["x", "t1", "t2"]
    assert module.output_names()[1:] == ["t"]


@needs_wheel
def test_a_training_is_that_of_onnxruntimes_own_blocks(tmp_path: Path) -> None:
    from onnxruntime.training import artifacts

    theirs = blocks_of("wheel")
    settings: dict[str, Any] = {"weight_decay": 0.1, "betas": (0.8, 0.99), "bias_correction": False}
    adam = theirs.optim.AdamW(**settings, clip_grad=theirs.optim.ClipGradNorm(0.5))
    artifacts.generate_artifacts(network(), WEIGHTS, [], two_losses(theirs), adam, str(tmp_path))
    # its optimizer gets the IR version of the onnx package, which it cannot read
    model = onnx.load(tmp_path / "optimizer_model.onnx")
    model.ir_version = 10
    onnx.save(model, tmp_path / "optimizer_model.onnx")
    training = WheelTraining(tmp_path)
    expected = [float(training.step(*batch)) for batch in BATCHES]
    own = onnxblock.optim.AdamW(**settings, clip_grad=onnxblock.optim.ClipGradNorm(0.5))
    for flavour in FILES:
        directory = tmp_path / flavour
        generate_artifacts(network(), directory, loss=two_losses(onnxblock), optimizer=own, flavour=flavour)
        losses, module = trained(directory, flavour)
        np.testing.assert_allclose(losses, expected, rtol=1e-6)
        for name, value in training.data().items():
            np.testing.assert_allclose(module.state.parameters[name].data, value, rtol=1e-5, atol=1e-6)


LOSSES: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "MSELoss": ({}, F.mse_loss),
    "MSELoss sum": ({"reduction": "sum"}, lambda y, t: F.mse_loss(y, t, reduction="sum")),
    "L1Loss none": ({"reduction": "none"}, lambda y, t: F.l1_loss(y, t, reduction="none")),
    "BCEWithLogitsLoss": (
        {"weight": floats(3) ** 2, "pos_weight": floats(3, seed=1) ** 2},
        lambda y, t: F.binary_cross_entropy_with_logits(
            y, t, torch.from_numpy(floats(3) ** 2), pos_weight=torch.from_numpy(floats(3, seed=1) ** 2)
        ),
    ),
    "CrossEntropyLoss": (
        {"weight": floats(3) ** 2, "ignore_index": 1},
        lambda y, t: F.cross_entropy(y, t, torch.from_numpy(floats(3) ** 2), ignore_index=1),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_torchs(name: str) -> None:
    arguments, reference = LOSSES[name]

    class Loss(onnxblock.ForwardBlock):
        def build(self, y: str) -> str:
            return getattr(onnxblock.loss, name.split()[0])(**arguments)(y)

    block = Loss()
    with pytest.raises(RuntimeError, match="call the block first"):
        block.to_model_proto()
    with onnxblock.base(network()) as accessor:
        output = block("y")
        assert accessor.model == block.to_model_proto()
    model = block.to_model_proto()
    classes = name == "CrossEntropyLoss"
    assert [i.name for i in model.graph.input] == ["x", "labels" if classes else "target"]
    assert [o.name for o in model.graph.output] == [output]
    target = np.array([0, 1, 2, 2]) if classes else floats(4, 3, seed=5)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": BATCHES[0][0], model.graph.input[1].name: target})
    expected = reference(forward(leaves(), BATCHES[0][0]), torch.from_numpy(target))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)


class Classes(onnxblock.TrainingBlock):
    def build(self, y: str) -> str:
        return onnxblock.loss.CrossEntropyLoss()(y)


CLASSES = [(x, np.arange(len(x)) % 3) for x, _, _ in BATCHES]


def training_files(directory: Path) -> Classes:
    """The files of artifacts, made by hand."""
    block = Classes()
    for name in WEIGHTS:
        block.requires_grad(name)
    with onnxblock.base(network()):
        block("y")
    optimizer = onnxblock.optim.AdamW()
    with onnxblock.empty_base() as accessor:
        optimizer(block.parameters())
        assert optimizer.to_model_proto() == accessor.model
    models = zip(FILES["ort-training"][1:], (*block.to_model_proto(), optimizer.to_model_proto()), strict=True)
    for name, model in models:
        onnx.save(model, directory / name)
    onnxblock.save_checkpoint(block.parameters(), directory / "checkpoint")
    return block


def test_a_training_block_gives_files_that_train(tmp_path: Path) -> None:
    block = training_files(tmp_path)
    model, evaluation = block.to_model_proto()
    buffers = [f"{n}_grad.accumulation.buffer" for n in WEIGHTS]
    assert [i.name for i in model.graph.input] == ["x", "labels", *WEIGHTS, *buffers, "lazy_reset_grad"]
    assert [o.name for o in model.graph.output][1:] == [f"{n}_grad.accumulation.out" for n in WEIGHTS]
    assert [i.name for i in evaluation.graph.input] == ["x", "labels", *WEIGHTS]
    losses, module = trained(tmp_path, "ort-training", data=CLASSES)
    direct = tmp_path / "direct"
    generate_artifacts(network(), direct, loss="CrossEntropyLoss", optimizer=onnxblock.optim.AdamW())
    np.testing.assert_allclose(losses, trained(direct, "portable", data=CLASSES)[0], rtol=1e-6)
    module.eval()
    assert np.isfinite(module(*CLASSES[0]))
    CheckpointState.save_checkpoint(module.state, tmp_path / "after")
    changed = network()
    onnxblock.load_checkpoint_to_model(tmp_path / "after", changed)
    for initializer in changed.graph.initializer:
        data = onnx.numpy_helper.to_array(initializer)
        np.testing.assert_array_equal(data, module.state.parameters[initializer.name].data)
    with pytest.raises(ValueError, match="the model has no initializer 'w'"):
        onnxblock.load_checkpoint_to_model(tmp_path / "after", parse("g (float x) => (float y) { y = Abs(x) }"))


@needs_wheel
def test_the_files_of_a_training_block_train_in_onnxruntimes_classes(tmp_path: Path) -> None:
    training_files(tmp_path)
    training = WheelTraining(tmp_path)
    losses = [float(training.step(*batch)) for batch in CLASSES]
    np.testing.assert_allclose(losses, trained(tmp_path, "ort-training", data=CLASSES)[0], rtol=1e-6)


def test_which_gradients_a_training_block_computes() -> None:
    block = Classes()
    for unbuilt in (block.parameters, block.to_model_proto):
        with pytest.raises(RuntimeError, match="Please build the training"):
            unbuilt()
    block.requires_grad("w")
    block.requires_grad("x")
    block.requires_grad("b", False)
    block.requires_grad("v")
    block.requires_grad("v", False)
    with onnxblock.base(network()):
        block("y")
    assert [[p.name for p in some] for some in block.parameters()] == [["w"], ["b", "v"]]
    outputs = [o.name for o in block.to_model_proto()[0].graph.output]
    assert outputs[1:] == ["x_grad.accumulation.out", "w_grad.accumulation.out"]
    block.requires_grad("q")
    with (
        onnxblock.base(network()),
        pytest.raises(ValueError, match=r"no initializer or input 'q'\. It has: w, b, v, x"),
    ):
        block("y")


def test_an_evaluation_model_does_not_train() -> None:
    class Mean(onnxblock.TrainingBlock):
        def build(self, y: str) -> str:
            return onnxblock.blocks.ReduceMean(keepdims=False)(y)

    text = """g (float[N,3] x) => (float[N,3] y) {
        yes = Constant<value = bool {1}>() r = Constant<value = float {0.5}>() d = Dropout(x, r, yes)
        y, m, v = BatchNormalization<training_mode=1>(d, s, b, mean, var) }"""
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    block = Mean()
    block.requires_grad("s")
    with (
        onnxblock.base(parse(text, s=ones, b=zeros, mean=zeros, var=ones)),
        pytest.raises(UnsupportedError, match=r"Training changes 'mean', 'var', .*requires_grad\(name, False\)"),
    ):
        block("y")
    block = Mean()
    block.requires_grad("s")
    block.requires_grad("mean", False)
    block.requires_grad("var", False)
    with onnxblock.base(parse(text, s=ones, b=zeros, mean=zeros, var=ones)):
        block("y")
    evaluation = block.to_model_proto()[1]
    feed = {"x": floats(4, 3), "s": ones, "mean": zeros, "var": ones}
    session = onnxruntime.InferenceSession(evaluation.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, feed)[0], floats(4, 3).mean() / (1 + 1e-5) ** 0.5, rtol=1e-5)


def test_blocks_compute_what_they_are_called() -> None:
    b = onnxblock.blocks
    cases: dict[str, tuple[Callable[[str], str], Callable[[np.ndarray], np.ndarray]]] = {
        "add": (lambda x: b.Add()(x, b.Constant(2.0)()), lambda x: x + 2),
        "sub": (lambda x: b.Sub()(x, b.Constant(2.0)()), lambda x: x - 2),
        "div": (lambda x: b.Div()(x, b.Constant(2.0)()), lambda x: x / 2),
        "pow": (lambda x: b.Pow(3.0)(x), lambda x: x**3),
        "sigmoid": (lambda x: b.Sigmoid()(x), lambda x: 1 / (1 + np.exp(-x))),
        "log": (lambda x: b.Log()(b.Abs()(x)), lambda x: np.log(np.abs(x))),
        "neg": (lambda x: b.Neg()(x), lambda x: -x),
        "clip": (lambda x: b.Clip(-0.5, 0.25)(x), lambda x: x.clip(-0.5, 0.25)),
        "below": (lambda x: b.Clip(clip_max=0.25)(x), lambda x: x.clip(None, 0.25)),
        "sum": (lambda x: b.ReduceSum()(x), lambda x: x.sum(keepdims=True)),
        "cast": (lambda x: b.Cast(onnx.TensorProto.INT64)(x), lambda x: x.astype(np.int64)),
        "label": (
            lambda x: b.LabelEncoder(keys_floats=[0.5, 1.0], values_int64s=[5, 6], default_int64=7)(b.Sigmoid()(x)),
            lambda x: np.full(x.shape, 7),
        ),
    }
    x = floats(2, 3)
    with onnxblock.empty_base(17) as accessor:
        accessor.model.graph.input.append(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 3]))

        class All(onnxblock.ForwardBlock):
            def build(self, x: str) -> list[str]:
                return [make(x) for make, _ in cases.values()]

        outputs = All()("x")
        model = onnx.ModelProto.FromString(accessor.model.SerializeToString())
        with pytest.raises(RuntimeError, match="There is a base model already"), onnxblock.base(network()):
            pass
        with pytest.raises(LookupError, match="'q' is no input and no output of the model; it has x"):
            onnxblock.blocks.InputLike("q")()
        assert onnxblock.blocks.InputLike("x")() in [i.name for i in accessor.model.graph.input]
        with pytest.raises(onnx.checker.ValidationError):
            onnxblock.blocks.Add()("x", "nowhere")
    model.ir_version = 8
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results = session.run(outputs, {"x": x})
    for found, (_, expected) in zip(results, cases.values(), strict=True):
        np.testing.assert_allclose(found, expected(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="A block was called without a model"):
        onnxblock.blocks.Neg()("x")


def test_a_loss_with_layers_and_a_norm_of_weights(tmp_path: Path) -> None:
    class Projected(onnxblock.Block):
        """Classes of another number, from a layer of its own, whose weights are kept small."""

        def build(self, y: str) -> tuple[str, str]:
            b = onnxblock.blocks
            scores = b.Linear(3, 4)(y)
            loss = onnxblock.loss.CrossEntropyLoss()(
                y, b.LabelEncoder(keys_int64s=[7], values_int64s=[2])(self.labels())
            )
            return b.Add()(loss, b.Mul()(b.ReduceAllL2()("w", "v"), b.ReduceMean(keepdims=False)(scores))), scores

        def labels(self) -> str:
            self.base.graph.input.append(onnx.helper.make_tensor_value_info("labels", onnx.TensorProto.INT64, ["L"]))
            return "labels"

    made = generate_artifacts(network(), tmp_path, loss=Projected(), optimizer="SGD")
    weight, bias = (n for n in made.state.trained if n not in WEIGHTS)
    assert weight.startswith("onnx::linear.weight::") and made.state.parameters[bias].shape == (4,)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint.safetensors")
    module = Module(tmp_path / "train_step.onnx", state)
    x, labels = BATCHES[0][0], np.array([7, 7, 7, 7])
    weights = {n: torch.from_numpy(p.data.copy()).requires_grad_() for n, p in state.parameters}
    y = forward(weights, x)
    scores = y @ weights[weight] + weights[bias]
    norm = (weights["w"].square().sum() + weights["v"].square().sum()).sqrt()
    loss = F.cross_entropy(y, torch.full((4,), 2)) + norm * scores.mean()
    loss.backward()
    found, shown = module(x, labels)
    assert float(found) == pytest.approx(loss.item(), rel=1e-5)
    np.testing.assert_allclose(shown, scores.detach().numpy(), rtol=1e-4, atol=1e-5)
    for name, tensor in weights.items():
        np.testing.assert_allclose(state.parameters[name].grad, tensor.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_what_blocks_cannot_do_is_refused(tmp_path: Path) -> None:
    class Nothing(onnxblock.Block):
        def build(self, *names: str) -> None:
            return None

    class Foreign(onnxblock.ForwardBlock):
        def build(self, parameters: Any) -> str:
            self.base.graph.input.append(onnx.helper.make_tensor_value_info("s", onnx.TensorProto.FLOAT, []))
            return onnxblock.blocks.Neg()("s")

    with pytest.raises(TypeError, match="expected the name of the loss"):
        generate_artifacts(network(), tmp_path, loss=Nothing())
    with pytest.raises(TypeError, match="is an onnxblock, which adds to an ONNX model"):
        generate_artifacts(torch.nn.Linear(2, 2), tmp_path, inputs=torch.ones(2, 2), loss=Nothing())
    with pytest.raises(UnsupportedError, match=r"The model of Foreign: node .* \(Neg\) is not supported"):
        generate_artifacts(network(), tmp_path, loss=two_losses(onnxblock), optimizer=Foreign())
    with pytest.raises(ValueError, match="give the block clip_grad instead"):
        generate_artifacts(network(), tmp_path, optimizer=onnxblock.optim.SGD(), clip_grad_norm=1.0)
    with pytest.raises(RuntimeError, match="reduction='max': expected one of"):
        onnxblock.loss.MSELoss("max")
    with pytest.raises(FileNotFoundError, match="no library of custom operators"), onnxblock.custom_op_library("no.so"):
        pass
    assert not list(tmp_path.iterdir())
