"""Artifacts of the flavour "ort-training": trained by ONNX Runtime's own classes, and by those of this package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ondevice_models import config_of, rewritten, train
from ondevice_wheel import DATA, WheelTraining, needs_wheel
from orttrainer_models import Recording, batches, make

from lightning_ort.ondevice import CheckpointState, Module, Optimizer, generate_artifacts

RECORDED = [
    "mlp_adam_default", "mlp_adam_mode0_wd", "mlp_adam_mode1_wd", "mlp_adam_nobias", "FORMULA_mlp_adam_clip_0.1",
    "FORMULA_mlp_lamb_clip_0.1", "mlp_sgd_lr1e-1", "enc_adam_default", "FORMULA_enc_adam_clip_1.0",
    "FORMULA_enc_lamb_lr1e-2", "enc_sgd_lr1e-1",
]  # fmt: skip


def opened(folder: Path, checkpoint: str = "checkpoint") -> tuple[CheckpointState, Module, Optimizer]:
    state = CheckpointState.load_checkpoint(folder / checkpoint)
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    return state, module, Optimizer(folder / "optimizer_model.onnx", module)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 1e39, "\ud800"])
def test_properties_that_the_format_cannot_hold_are_refused_at_once(value):
    state = CheckpointState.load_checkpoint(DATA / "wheel_mlp" / "checkpoint_after")
    with pytest.raises(ValueError, match=r"Property 'n' is .*, which a checkpoint of flavour .*cannot hold"):
        state.properties["n"] = value
    assert "n" not in state.properties
    for possible in (2**63 - 1, -(2**63), 3.4e38, float("inf"), "é"):
        state.properties["n"] = possible


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """Artifacts of both recorded models, to be written with various optimizers."""
    found = {}
    for name in ("mlp", "enc"):
        x, labels = batches(name, 1)[0]
        folder, inputs = tmp_path_factory.mktemp(name), {"x": x, "labels": labels}
        found[name] = generate_artifacts(
            make(name), folder, inputs=inputs, loss="CrossEntropyLoss", flavour="ort-training", verify=False
        )
    return found


def assert_recorded(recording: Recording, losses: list[float], weights: dict[str, np.ndarray]) -> None:
    expected = recording.arrays
    np.testing.assert_allclose(losses, expected["losses"], rtol=0, atol=2e-6)
    for name, value in weights.items():
        wanted = expected[f"w/{name}"]
        np.testing.assert_allclose(value, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max(), err_msg=name)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_trainings(name, generated, tmp_path):
    recording = Recording(name)
    model, config = recording.settings["model"], config_of(recording)
    folder = rewritten(generated[model], tmp_path, config, "ort-training")
    data = batches(model, recording.settings["steps"])
    state, module, optimizer = opened(folder)
    assert optimizer.get_learning_rate() == np.float32(config.lr)
    assert_recorded(recording, train(module, optimizer, data), {n: p.data for n, p in state.parameters})
    CheckpointState.save_checkpoint(state, folder / "after", include_optimizer_state=True)
    moments = state.training_state.optimizer.moments
    again = CheckpointState.load_checkpoint(folder / "after").training_state.optimizer
    assert again.step == len(data) and again.kind == config.kind
    for parameter, found in again.moments.items():
        assert all(np.array_equal(t, moments[parameter][m]) for m, t in found.items())


@needs_wheel
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_trainings_by_onnx_runtime(name, generated, tmp_path):
    recording = Recording(name)
    model, config = recording.settings["model"], config_of(recording)
    folder = rewritten(generated[model], tmp_path, config, "ort-training")
    training = WheelTraining(folder)
    training.optimizer.set_learning_rate(config.lr)
    losses = [float(training.step(x.numpy(), y.numpy())) for x, y in batches(model, recording.settings["steps"])]
    assert_recorded(recording, losses, training.data())
    training.save(folder / "after")
    found = CheckpointState.load_checkpoint(folder / "after").training_state.optimizer
    for key, value in recording.arrays.items():
        if key.startswith("opt/") and "Moment" in key:
            _, parameter, moment = key.split("/")
            got = found.moments[parameter][moment.lower()]
            np.testing.assert_allclose(got, value, rtol=0, atol=2e-5 * max(np.abs(value).max(), 1e-6), err_msg=key)


def inputs_of(name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    if name == "wheel_mlp":
        return [(x.numpy(), y.numpy()) for x, y in batches("mlp")]
    random = np.random.RandomState(3)
    drawn = {
        "wheel_cnn": [(random.randn(6, 1, 8, 8).astype(np.float32), random.randint(0, 5, 6)) for _ in range(10)],
        "wheel_transformer": [(random.randint(0, 11, (6, 7)), random.randint(0, 5, 6)) for _ in range(10)],
    }
    return drawn[name]


@pytest.mark.parametrize("name", ["wheel_mlp", "wheel_cnn", "wheel_transformer"])
def test_artifacts_that_onnx_runtime_has_made(name):
    folder, recorded = DATA / name, np.load(DATA / name / "recorded.npz")
    state, module, optimizer = opened(folder)
    optimizer.set_learning_rate(0.01)
    data = inputs_of(name)
    losses = []
    for x, y in data:
        losses.append(module(x, y))
        optimizer.step()
        module.lazy_reset_grad()
    np.testing.assert_allclose(losses, recorded["losses"], rtol=0, atol=2e-6)
    np.testing.assert_allclose(module.eval()(*data[0]), recorded["eval_loss"], rtol=0, atol=5e-6)
    theirs = CheckpointState.load_checkpoint(folder / "checkpoint_after")
    for parameter, p in theirs.parameters:
        np.testing.assert_allclose(state.parameters[parameter].data, p.data, rtol=0, atol=1e-5, err_msg=parameter)
    assert module.input_names() == ["x", "labels"]
    frozen = [n for n, p in state.parameters if not p.requires_grad]
    assert frozen == [n for n, p in theirs.parameters if not p.requires_grad] and (frozen or "transformer" in name)


def test_a_training_model_as_the_evaluation_model(generated, tmp_path):
    folder = rewritten(generated["mlp"], tmp_path, config_of(Recording("mlp_adam_default")), "ort-training")
    model = folder / "training_model.onnx"
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    with pytest.raises(ValueError, match=r"training_model.onnx' takes '.*, as training models do; expected an eval"):
        Module(model, state, model)
