"""What ORTTrainer refuses, with which words, and that it is unharmed afterwards."""

from __future__ import annotations

import re

import h5py
import numpy as np
import onnxruntime
import pytest
import torch
from orttrainer_models import ADAM, SGD, batches, cross_entropy, description, make, options, trainer
from torch import nn

from lightning_ort import ORTTrainer, amp


def built(**changed):
    arguments = {
        "model": make(),
        "model_desc": description(),
        "optim_config": SGD(),
        "loss_fn": cross_entropy,
        "options": options(),
        **changed,
    }
    return ORTTrainer(**arguments)


INPUTS = [("x", ["b", 20]), ("label", ["b"])]
OUTPUTS = [("loss", [], True), ("logits", ["b", 10])]

DESCRIPTIONS = [
    ({"outputs": OUTPUTS}, ValueError, "{'inputs': ['required field']}"),
    ({"inputs": INPUTS}, ValueError, "{'outputs': ['required field']}"),
    ({"inputs": INPUTS, "outputs": OUTPUTS, "z": 1}, ValueError, "{'z': ['unknown field']}"),
    (
        {"inputz": INPUTS, "outputs": OUTPUTS},
        ValueError,
        "{'inputs': ['required field'], 'inputz': ['unknown field']}",
    ),
    (
        {"inputs": [("x", [-1])], "outputs": OUTPUTS},
        ValueError,
        "{'inputs': [{0: ['each shape must be a size, from 0; name one that may change']}]}",
    ),
    ({"inputs": "x", "outputs": OUTPUTS}, IndexError, "{'inputs': ['must be of list type']}"),
    ({"inputs": [("x",)], "outputs": OUTPUTS}, IndexError, "{'inputs': [{0: ['must be a tuple with size 2']}]}"),
    (
        {"inputs": [(1, [])], "outputs": OUTPUTS},
        ValueError,
        "{'inputs': [{0: ['the first element of the tuple (aka name) must be a string']}]}",
    ),
    (
        {"inputs": [("x", [1.5])], "outputs": OUTPUTS},
        ValueError,
        "{'inputs': [{0: ['each shape must be either a string or integer']}]}",
    ),
    (
        {"inputs": [("x", (1,))], "outputs": OUTPUTS},
        ValueError,
        "{'inputs': [{0: ['the second element of the tuple (aka shape) must be a list']}]}",
    ),
    (
        {"inputs": INPUTS, "outputs": [("loss", [], "yes")]},
        ValueError,
        "{'outputs': [{0: ['the third element of the tuple (aka is_loss) must be a boolean']}]}",
    ),
    (
        {"inputs": INPUTS, "outputs": [("loss", [], True), ("more", [], True)]},
        ValueError,
        "{'outputs': [{1: ['only one is_loss can be set to True']}]}",
    ),
    (
        {"inputs": [], "outputs": []},
        ValueError,
        "{'inputs': ['min length is 1'], 'outputs': ['min length is 1']}",
    ),
    (
        {"inputs": INPUTS, "outputs": [("loss", [], True, 1)]},
        ValueError,
        "{'outputs': [{0: ['must be a tuple with size 2 or 3']}]}",
    ),
    (
        {"inputs": [["x", []]], "outputs": OUTPUTS},
        ValueError,
        "{'inputs': [{0: ['must be a tuple with size 2']}]}",
    ),
    (
        {"inputs": [("x", []), ("x", [])], "outputs": OUTPUTS},
        ValueError,
        "{'inputs': [{1: [\"the name 'x' occurs twice\"]}]}",
    ),
]


@pytest.mark.parametrize(("given", "kind", "message"), DESCRIPTIONS, ids=[m for _, _, m in DESCRIPTIONS])
def test_wrong_descriptions(given, kind, message):
    with pytest.raises(kind, match=re.escape(f"Invalid model_desc: {message}")):
        built(model_desc=given)


CONFIG = "'optim_config' is required and must be any of 'AdamConfig', 'LambConfig' or 'SGDConfig'"
LOSS = "'loss_fn' must be either 'None' or a callable with two parameters"
ARGUMENTS = [
    ({"model_desc": [1]}, AssertionError, "'model_desc' must be a 'dict'"),
    ({"model": None}, AssertionError, "'model' is required and must be either a 'torch.nn.Module' or ONNX model"),
    ({"model": "m"}, ValueError, "'model' must be either 'torch.nn.Module' or 'onnx.ModelProto'"),
    ({"optim_config": None}, AssertionError, CONFIG),
    ({"optim_config": torch.optim.SGD([torch.zeros(1)], 0.1)}, AssertionError, CONFIG),
    ({"loss_fn": lambda x: x}, AssertionError, LOSS),
    ({"loss_fn": "loss"}, AssertionError, LOSS),
    ({"options": {}}, AssertionError, "'options' must be either 'None' or 'ORTTrainerOptions'"),
    (
        {"options": options(utils={"frozen_weights": ["nope"]})},
        RuntimeError,
        "['nope'] params from 'frozen_weights' not found in the ONNX model.",
    ),
    (
        {"options": options(mixed_precision={"loss_scaler": amp.LossScaler(1.0)})},
        ValueError,
        "Loss Scaler cannot be specified when Mixed Precision is not enabled",
    ),
    (
        {"optim_config": ADAM([{"params": ["nope"], "alpha": 0.5}])},
        ValueError,
        "['nope'] in a group of the optimizer are no weights of the model",
    ),
    (
        {"options": options(_internal_use={"extra_postprocess": lambda m: m})},
        NotImplementedError,
        "options['_internal_use.extra_postprocess'] rewrites the ONNX model",
    ),
    (
        {"model_desc": {"inputs": INPUTS, "outputs": [("logits", ["b", 10]), ("loss", [], True)]}},
        ValueError,
        "With loss_fn the loss is the first output, but model_desc marks 'loss'",
    ),
]


@pytest.mark.parametrize(("changed", "kind", "message"), ARGUMENTS, ids=[m for _, _, m in ARGUMENTS])
def test_wrong_arguments(changed, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        built(**changed)


def test_a_refused_construction_changes_nothing():
    """Neither the module, which would be frozen in part, nor the session options, which would be deterministic."""
    model, session = make(), onnxruntime.SessionOptions()
    given = options(
        utils={"frozen_weights": ["fc1.weight"]}, session_options=session, debug={"deterministic_compute": True}
    )
    with pytest.raises(ValueError, match="in a group of the optimizer are no weights of the model"):
        built(model=model, optim_config=ADAM([{"params": ["nope"], "alpha": 0.5}]), options=given)
    assert all(p.requires_grad for p in model.parameters()) and not session.use_deterministic_compute
    session.intra_op_num_threads = -1
    with pytest.raises(ValueError, match=r"session_options.intra_op_num_threads=-1: expected an integer from 0"):
        built(model=model, options=given)
    assert all(p.requires_grad for p in model.parameters()) and not session.use_deterministic_compute
    with pytest.raises(ValueError, match=r"provider_options has 'a' for CPUExecutionProvider"):
        built(options=options(provider_options={"CPUExecutionProvider": {"a": "b"}}))


X, LABEL = batches(count=1)[0]

CALLS = [
    ("too few", (X,), {}, AssertionError, "Missing inputs: label. The model's inputs are x, label."),
    ("too many", (X, LABEL, X), {}, AssertionError, "3 inputs were given in order, but the model has 2 (x, label)."),
    ("none", (), {}, AssertionError, "Missing inputs: x, label."),
    ("a tuple", ((X, LABEL),), {}, AssertionError, "The inputs came as one tuple"),
    ("a short list", ([X],), {}, AssertionError, "Missing inputs: label."),
    ("unknown name", (X, LABEL), {"foo": X}, AssertionError, "The model has no inputs 'foo'"),
    ("twice", (X, LABEL), {"x": X}, AssertionError, "Inputs given both in order and by name: x."),
    (
        "numpy",
        (X.numpy(), LABEL),
        {},
        AttributeError,
        "Input 'x' is a ndarray; expected a torch.Tensor: use torch.from_",
    ),
    ("a list", (X, [1]), {}, AttributeError, "Input 'label' is a list; expected a torch.Tensor."),
    ("double", (X.double(), LABEL), {}, RuntimeError, "Unexpected input data type for 'x'. Actual: torch.float64, exp"),
    ("int32", (X, LABEL.int()), {}, RuntimeError, "Unexpected input data type for 'label'. Actual: torch.int32"),
    (
        "features",
        (X[:, 1:], LABEL),
        {},
        RuntimeError,
        "Got invalid dimensions for input 'x': index 1 got: 19 expected: 20",
    ),
    ("rank", (X[0], LABEL), {}, RuntimeError, "Got invalid dimensions for input 'x': got 1 dimensions [20]"),
    ("batches", (X, LABEL[:3]), {}, AssertionError, "Mismatch in dynamic shape b: 16 in 'x', 3 in 'label'"),
    ("swapped", (LABEL, X), {}, RuntimeError, "Unexpected input data type for 'x'. Actual: torch.int64"),
    ("large label", (X, LABEL + 17), {}, (RuntimeError, IndexError), "'label': torch.int64 [16], values 18 to 26"),
    ("negative label", (X, LABEL - 2), {}, (RuntimeError, IndexError), "'label': torch.int64 [16], values -1 to"),
]


@pytest.fixture(scope="module")
def used():
    found = trainer()
    found.train_step(X, LABEL)
    return found


@pytest.mark.parametrize(("case", "args", "kwargs", "kind", "message"), CALLS, ids=[c for c, *_ in CALLS])
def test_wrong_inputs(used, case, args, kwargs, kind, message):
    before, info = used.state_dict(), (used._train_step_info.step, used._train_step_info.optimization_step)
    for step in (used.train_step, used.eval_step):
        with pytest.raises(kind, match=re.escape(message)):
            step(*args, **kwargs)
    assert info == (used._train_step_info.step, used._train_step_info.optimization_step)
    after = used.state_dict()
    for name, value in before["model"]["full_precision"].items():
        np.testing.assert_array_equal(after["model"]["full_precision"][name], value)
    assert all(p.grad is None for p in used._combined.parameters())


def test_first_call_with_wrong_types_names_the_inputs():
    fresh = trainer()
    with pytest.raises(RuntimeError, match=r"'x': torch.float64 \[16, 20\].*Nothing was updated"):
        fresh.train_step(X.double(), LABEL)
    assert fresh._train_step_info.step == 0
    expected = cross_entropy(make()(X), LABEL).item()
    assert float(fresh.train_step(X, LABEL)[0]) == pytest.approx(expected, abs=1e-6)


def test_first_call_with_too_few_inputs_leaves_a_trainer_that_can_begin():
    fresh = trainer()
    for args in ((X,), (), ((X, LABEL),)):
        with pytest.raises(AssertionError, match=r"Missing inputs: |The inputs came as one tuple"):
            fresh.train_step(*args)
    assert fresh._train_step_info.step == 0
    expected = cross_entropy(make()(X), LABEL).item()
    assert float(fresh.train_step(X, LABEL)[0]) == pytest.approx(expected, abs=1e-6)


def test_a_described_size_is_no_value_of_an_input():
    label = LABEL % 3 + 1
    wrong = description()
    wrong["outputs"][1] = ("logits", ["b", 11])
    with pytest.raises(RuntimeError, match=r"index 1 got: 10 expected: 11\. The inputs were .*, values 1 to 3\."):
        built(model_desc=wrong).train_step(X, label)


def test_state_and_checkpoint_before_a_step_hold_the_weights_and_fresh_moments(tmp_path):
    fresh, module = trainer(ADAM()), make()
    state = fresh.state_dict()
    fresh.save_checkpoint(tmp_path / "c.h5")
    with h5py.File(tmp_path / "c.h5") as file:
        for name, weight in module.named_parameters():
            np.testing.assert_array_equal(state["model"]["full_precision"][name], weight.detach())
            np.testing.assert_array_equal(file["model/full_precision"][name], weight.detach())
            for moment in ("Moment_1", "Moment_2"):
                assert state["optimizer"][name][moment].shape == weight.shape
                assert not state["optimizer"][name][moment].any() and not file["optimizer"][name][moment][()].any()
        assert file["train_step_info/step"][()] == 0


def test_arguments_in_all_forms_are_the_same():
    reference = trainer(SGD(lr=0.0))
    expected = reference.train_step(X, LABEL)
    for args, kwargs in [
        (([X, LABEL],), {}),
        ((), {"x": X, "label": LABEL}),
        ((), {"label": LABEL, "x": X}),
        ((X,), {"label": LABEL}),
        (([X],), {"label": LABEL}),
    ]:
        for got, wanted in zip(reference.train_step(*args, **kwargs), expected, strict=True):
            assert torch.equal(got, wanted)
    # a layout that is not contiguous, and another batch size
    loss, _ = reference.train_step(X.t().contiguous().t(), LABEL)
    assert float(loss) == pytest.approx(float(expected[0]), abs=1e-6)
    loss, logits = reference.train_step(X[:5], LABEL[:5])
    assert float(loss) == pytest.approx(cross_entropy(make()(X[:5]), LABEL[:5]).item(), abs=1e-6)
    assert logits.shape == (5, 10)


def test_descriptions_are_named_tuples(used):
    """Types come last, when they are known."""
    fresh = built().model_desc
    assert fresh.inputs == [("x", ["b", 20]), ("label", ["b"])] and fresh.inputs[0].dtype is None
    assert fresh.outputs == [("loss", [], True), ("logits", ["b", 10], False)]
    known = used.model_desc
    assert known.inputs[1] == ("label", ["b"], torch.int64) and known.inputs[0][0] == known.inputs[0].name == "x"
    assert known.outputs[0] == ("loss", [], True, torch.float32) and known.outputs[1].is_loss is False


def test_no_loss_is_refused_by_training_and_not_by_evaluation():
    model_desc = {"inputs": [("x", ["b", 20])], "outputs": [("logits", ["b", 10])]}
    found = built(model_desc=model_desc, loss_fn=None)
    with pytest.raises(AssertionError, match=re.escape("Only one loss output is supported (0 were specified)")):
        found.train_step(X)
    torch.testing.assert_close(found.eval_step(X), make()(X))


def test_loss_of_a_module_and_class_as_loss():
    found = built(loss_fn=nn.CrossEntropyLoss())
    assert [r.shape for r in found.train_step(X, LABEL)] == [(), (16, 10)]


def test_outputs_other_than_described_are_named():
    wrong = {"inputs": INPUTS, "outputs": [("loss", [], True)]}
    with pytest.raises(RuntimeError, match=r"The model gives 2 outputs, but model_desc describes 1 \(loss\)"):
        built(model_desc=wrong).train_step(X, LABEL)
    wrong = {"inputs": INPUTS, "outputs": [("loss", [], True), ("logits", ["b", 9])]}
    with pytest.raises(RuntimeError, match="Output 'logits' is not as described in model_desc: index 1 got: 10 exp"):
        built(model_desc=wrong).train_step(X, LABEL)
    # the number 3 is among the labels too, which is no matter
    wrong = {"inputs": INPUTS, "outputs": [("loss", [], True), ("logits", ["b", 10]), ("z", ["b", 10])]}
    with pytest.raises(RuntimeError, match=r"describes 3 \(loss, logits, z\)\. The inputs were"):
        built(model_desc=wrong).train_step(X, LABEL.clamp(max=3))


def test_what_dynamo_tells_stays_out_of_the_log(capfd):
    with pytest.raises(RuntimeError, match=r"train_step failed: .*got Float"):
        built().train_step(X, LABEL.float())
    said = "".join(capfd.readouterr())
    assert not any(words in said for words in ("WON'T CONVERT", "run meta"))


def test_fetches_choose_outputs(used):
    info = used._train_step_info
    try:
        info.fetches = ["loss"]
        assert used.eval_step(X, LABEL).shape == ()
        info.fetches = ["logits", "loss"]
        assert [r.shape for r in used.eval_step(X, LABEL)] == [(16, 10), ()]
        info.fetches = ["nope"]
        with pytest.raises(RuntimeError, match=r"The specified fetches list contains invalid output names: .'nope'."):
            used.eval_step(X, LABEL)
    finally:
        info.fetches = []


@pytest.mark.parametrize("change", ["layer", "values", "further"])
def test_other_parameters_than_those_it_was_made_with(change):
    """Steps would use them, and no update would reach them."""
    model, (first, *_) = make(), batches(count=1)
    found = trainer(SGD(lr=0.1), model=model)
    found.train_step(*first)
    before = found.state_dict()["model"]["full_precision"]
    kept = model.fc2
    if change == "layer":
        model.fc2 = nn.Linear(32, 16)
    elif change == "values":
        model.load_state_dict({n: t + 1 for n, t in model.state_dict().items()}, assign=True)
    else:
        model.further = nn.Linear(2, 2)
    name = {"layer": "fc2.weight, fc2.bias", "values": "fc1.weight, fc1.bias, fc2.weight", "further": "further.weight"}
    for call in (found.train_step, found.eval_step):
        with pytest.raises(RuntimeError, match=f"other parameters than those .* made with: {name[change]}"):
            call(*first)
    after = found.state_dict()["model"]["full_precision"]
    assert all(np.array_equal(after[n], before[n]) for n in before)
    if change == "layer":
        model.fc2 = kept
        found.train_step(*first)
