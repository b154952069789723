"""What users of each interface see of an index that is out of range, and that a refused step leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx.numpy_helper
import onnx.parser
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from orttrainer_models import ADAM, cross_entropy, options
from parity import fit, make_trainer, quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ort import (
    IndexOutOfRangeError,
    ORTTrainer,
    RefusedValueError,
    TrainingParameters,
    TrainingSession,
)
from lightning_ort.ondevice import CheckpointState, Module, Optimizer, generate_artifacts

pytestmark = pytest.mark.stock_only

UNHARMED = "Nothing was updated."


class Network(nn.Module):
    """Words to the scores of five classes; its running statistics would show a step that was half done."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.norm = nn.BatchNorm1d(8)
        self.scores = nn.Linear(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.scores(self.norm(self.words(ids).mean(1)))


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.network(ids), labels)


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def changed(tensor: Tensor, value: int) -> Tensor:
    result = tensor.clone()
    result.view(-1)[1] = value
    return result


random = torch.Generator().manual_seed(0)
IDS = torch.randint(0, 10, (8, 3), generator=random)
LABELS = torch.randint(0, 5, (8,), generator=random)
GOOD = (IDS, LABELS)
BAD = {
    "large index": (changed(IDS, 12), LABELS),
    "negative index": (changed(IDS, -1), LABELS),
    "large label": (IDS, changed(LABELS, 5)),
    "negative label": (IDS, changed(LABELS, -1)),
}
LIKE_EAGER = pytest.mark.parametrize("bad", BAD.values(), ids=BAD)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(np.asarray(after[name]), np.asarray(value), err_msg=name)


PARTS = {
    "large index": ["index or a class label, 12,", "embedding", "which takes 0 to 9", "self.words(ids)"],
    "negative index": ["index or a class label, -1,", "embedding", "which takes 0 to 9", "self.words(ids)"],
    "large label": ["class label", "nll_loss", "F.cross_entropy"],
    "negative label": ["class label", "nll_loss", "F.cross_entropy"],
}


def test_the_error_names_the_operator_its_line_and_what_it_takes() -> None:
    model = WithLoss()
    compiled = torch.compile(model, backend="lightning_ort", options={"on_unsupported": "error"})
    compiled(*GOOD).backward()
    before = state_of(model)
    for name, bad in BAD.items():
        with pytest.raises(IndexOutOfRangeError) as caught:
            compiled(*bad)
        assert isinstance(caught.value, IndexError) and isinstance(caught.value, RuntimeError)
        assert isinstance(caught.value, RefusedValueError)
        assert "Non-zero status code" in str(caught.value.__cause__)
        for part in [*PARTS[name], "test_rejected_steps.py", "Nothing was updated."]:
            assert part in str(caught.value)
    assert_same(before, state_of(model))


def test_an_assertion_fails_with_its_message() -> None:
    loss = torch.compile(lambda x, y: F.binary_cross_entropy(x, y), backend="lightning_ort")
    half, target = torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0])
    loss(half, target)  # the first run of a graph is eager's as well
    with pytest.raises(
        RefusedValueError, match=r"^all elements of input and target .* 1: in .*rejected_steps"
    ) as caught:
        loss(half * 3, target)
    assert not isinstance(caught.value, IndexError)


def test_other_errors_of_onnx_runtime_stay_what_they_are() -> None:
    from lightning_ort.runtime.value_errors import refusal

    text = "Non-zero status code returned while running {} node. Name:'{}' Status Message: {}"
    assert refusal(RuntimeError("no memory"), {}) is None
    assert refusal(RuntimeError(text.format("Add", "add/Add_1", "1 by 2 cannot be broadcast")), {}) is None
    found = str(refusal(RuntimeError(text.format("GatherND", "x/GatherND_7", "invalid index found, index = -7")), {}))
    assert (
        found == "An index or a class label, -7, is out of range in the node 'x/GatherND_7' of the graph. " + UNHARMED
    )


class Words(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        ids, labels = batch
        return F.cross_entropy(self.network(ids), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def test_a_fit_stops_where_eager_stops_and_goes_on_with_other_data() -> None:
    modules = {}
    for strategy in ("auto", "ort"):
        torch._dynamo.reset()
        module = modules[strategy] = Words()
        trainer = make_trainer(strategy, max_steps=5)
        data = DataLoader([GOOD, GOOD, BAD["negative index"], GOOD], batch_size=None)
        with pytest.raises(IndexError, match="out of range"), quiet():
            trainer.fit(module, data)
        assert trainer.global_step == 2
    for name, value in modules["auto"].state_dict().items():
        torch.testing.assert_close(modules["ort"].state_dict()[name], value, rtol=1e-5, atol=1e-6)
    weights = modules["ort"].state_dict()

    def restarted() -> Words:
        module = Words()
        module.load_state_dict(weights)
        return module

    fits = [fit(restarted, lambda: DataLoader([GOOD] * 3, batch_size=None), strategy=s, max_steps=3) for s in modules]
    for name, value in fits[0].module.state_dict().items():
        torch.testing.assert_close(fits[1].module.state_dict()[name], value, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def trainer() -> ORTTrainer:
    description = {
        "inputs": [("ids", [8, 3]), ("labels", [8])],
        "outputs": [("loss", [], True), ("scores", [8, 5])],
    }
    found = ORTTrainer(network(), description, ADAM(lr=0.01), loss_fn=cross_entropy, options=options())
    with pytest.raises(IndexOutOfRangeError, match="train_step failed"):
        found.train_step(*BAD["negative index"])
    return found


@LIKE_EAGER
def test_a_refused_step_of_orttrainer(trainer, bad):
    for call in (trainer.train_step, trainer.eval_step):
        call(*GOOD)  # compiled anew: eager has a say in the first run
    before = trainer.state_dict()
    for call in (trainer.train_step, trainer.eval_step):
        with pytest.raises(IndexOutOfRangeError, match=r"The inputs were 'ids': .*Nothing was updated\.$"):
            call(*bad)
    after = trainer.state_dict()
    for part in ("model", "optimizer"):
        for name, values in before[part].items():
            assert_same(values, after[part][name])
    loss, _ = trainer.train_step(*GOOD)
    assert torch.isfinite(loss)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("artifacts")
    generate_artifacts(WithLoss(), directory, inputs={"ids": IDS, "labels": LABELS})
    return directory


@LIKE_EAGER
def test_a_refused_step_on_a_device(artifacts, bad):
    state = CheckpointState.load_checkpoint(artifacts / "checkpoint.safetensors")
    module = Module(artifacts / "train_step.onnx", state, artifacts / "eval_step.onnx")
    optimizer = Optimizer(artifacts / "train_step.onnx", module)
    good, bad = [t.numpy() for t in GOOD], [t.numpy() for t in bad]
    module(*good)
    before = {n: p.data.copy() for n, p in state.parameters}
    gradients = {n: p.grad.copy() for n, p in state.parameters}
    statistics = {n: b.clone() for n, b in state.training_state.buffers.items()}
    for training in (True, False):
        module.train(training)
        with pytest.raises(IndexOutOfRangeError, match="of the graph"):
            module(*bad)
    assert_same(before, {n: p.data for n, p in state.parameters})
    assert_same(gradients, {n: p.grad for n, p in state.parameters})
    assert_same(statistics, state.training_state.buffers)
    module.train()
    module(*good)
    for name, parameter in state.parameters:
        np.testing.assert_allclose(parameter.grad, 2 * gradients[name], rtol=1e-5, atol=1e-7)
    # gradients that were to be replaced are of no use either
    module.lazy_reset_grad()
    with pytest.raises(IndexOutOfRangeError):
        module(*bad)
    with pytest.raises(RuntimeError, match="no gradients yet"):
        optimizer.step()
    assert_same(before, {n: p.data for n, p in state.parameters})
    module(*good)
    np.testing.assert_allclose(
        state.parameters["network.scores.bias"].grad, gradients["network.scores.bias"], atol=1e-6
    )


MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
step (int64[batch, 3] ids, int64[batch] labels) => (float loss, float[batch, 5] scores)
<float[10, 8] words, float[8, 5] weight>
{
    rows = Gather(words, ids)
    mean = ReduceMean<axes = [1], keepdims = 0>(rows)
    scores = MatMul(mean, weight)
    loss = SoftmaxCrossEntropyLoss<reduction = "mean">(scores, labels)
}
"""


@pytest.fixture(scope="module")
def session() -> TrainingSession:
    model, weights = onnx.parser.parse_model(MODEL), network()
    values = {"words": weights.words.weight, "weight": weights.scores.weight.T}
    del model.graph.initializer[:]
    for name, value in values.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.detach().contiguous().numpy(), name))
    parameters = TrainingParameters()
    parameters.loss_output_name, parameters.training_optimizer_name = "loss", "AdamOptimizer"
    return TrainingSession(model.SerializeToString(), parameters)


@LIKE_EAGER
def test_a_refused_step_of_a_training_session(session, bad):
    feed = {"ids": IDS.numpy(), "labels": LABELS.numpy(), "Learning_Rate": [0.01]}
    session.run(["loss"], feed)
    before = session.get_state()
    ids, labels = bad
    ids = torch.where(ids < 0, ids - 10, ids)  # in an ONNX file, -1 is the last
    with pytest.raises(IndexOutOfRangeError, match="of the graph"):
        session.run(["loss"], feed | {"ids": ids.numpy(), "labels": labels.numpy()})
    assert_same(before, session.get_state())
    assert np.isfinite(session.run(["loss"], feed)[0])


def test_values_given_out_outlive_the_ortvalues_that_held_them(artifacts):
    state = CheckpointState.load_checkpoint(artifacts / "checkpoint.safetensors")
    module = Module(artifacts / "train_step.onnx", state)
    whole = module.get_contiguous_parameters().numpy()
    expected = torch.cat([p.detach().reshape(-1) for p in module._in_order(False)]).numpy()
    for _ in range(5):
        module.get_contiguous_parameters()
    np.testing.assert_array_equal(whole, expected)
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(t.numpy()) for t in GOOD]
    losses = [module(*values).numpy() for _ in range(3)]
    np.testing.assert_allclose(losses, [F.cross_entropy(network()(IDS), LABELS).item()] * 3, rtol=1e-5)
