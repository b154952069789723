"""On-device training on portable artifacts against the recorded trainings."""

from __future__ import annotations

import numpy as np
import pytest
from ondevice_models import config_of, opened, rewritten, strangers_training, train
from orttrainer_models import Recording, batches, make

from lightning_ort.ondevice import generate_artifacts

RECORDED = [
    "mlp_adam_default", "mlp_adam_mode0_wd", "mlp_adam_mode1_wd", "FORMULA_mlp_adam_clip_0.1",
    "FORMULA_mlp_lamb_lr1e-2_wd", "mlp_sgd_lr1e-1", "enc_adam_lr1e-2", "FORMULA_enc_adam_clip_1.0",
    "FORMULA_enc_lamb_lr1e-2",
]  # fmt: skip


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """Artifacts of both models, to be written with various optimizers."""
    found = {}
    for name in ("mlp", "enc"):
        x, labels = batches(name, 1)[0]
        found[name] = generate_artifacts(
            make(name), tmp_path_factory.mktemp(name), inputs={"x": x, "labels": labels}, loss="CrossEntropyLoss"
        )
    return found


@pytest.mark.parametrize("name", RECORDED)
def test_losses_and_states_are_the_recorded_ones(name, generated, tmp_path):
    recording = Recording(name)
    model, steps = recording.settings["model"], recording.settings["steps"]
    directory = rewritten(generated[model], tmp_path, config_of(recording))
    state, module, optimizer = opened(directory)
    data = batches(model, steps)
    losses = train(module, optimizer, data)
    expected = recording.arrays
    np.testing.assert_allclose(losses, expected["losses"], rtol=0, atol=2e-6)
    fed = [{"x": x.numpy(), "labels": y.numpy()} for x, y in data]
    others, tensors = strangers_training(directory, fed, optimizer.get_learning_rate())
    np.testing.assert_allclose(others, expected["losses"], rtol=0, atol=2e-6)
    assert tensors["optimizer/step"] == steps == state.training_state.optimizer.step
    for key, value in expected.items():
        kind, *where = key.split("/")
        if kind == "w":
            got = [state.parameters[where[0]].data, tensors[where[0]]]
        elif kind == "opt" and where[-1].startswith("Moment"):
            moment = where[1].lower()
            got = [state.training_state.optimizer.moments[where[0]][moment].numpy()]
            got.append(tensors[f"optimizer/{moment}/{where[0]}"])
        else:
            continue
        for found in got:
            np.testing.assert_allclose(found, value, rtol=0, atol=2e-5 * max(np.abs(value).max(), 1e-6), err_msg=key)


def test_evaluation_is_the_recorded_one(generated, tmp_path):
    recording = Recording("enc_adam_default")
    _, module, optimizer = opened(rewritten(generated["enc"], tmp_path, config_of(recording)))
    train(module, optimizer, batches("enc", recording.settings["steps"]))
    x, labels = batches("enc", 1, recording.settings["eval_seed"])[0]
    loss = module.eval()(x.numpy(), labels.numpy())
    np.testing.assert_allclose(loss, recording.arrays["eval_loss"], rtol=0, atol=2e-6)
