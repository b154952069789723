"""Trainings recorded with ONNX Runtime's ORTTrainer, or computed by its formulas, and the same ones here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from orttrainer_models import RECORDINGS, Recording, batches

from lightning_ort.optim.rules import Adam, FusedAdam

EVALUATED = ["mlp_adam_default", "enc_adam_default"]
# Adam on the CPU is torch's fused kernel unless all is to be in ONNX Runtime
IN_ONNXRUNTIME = ["mlp_adam_groups", "mlp_adam_mode1_wd", "FORMULA_mlp_adam_acc4", "FORMULA_mlp_adam_clip_0.1"]


@pytest.mark.parametrize(
    ("name", "placement"), [(n, "fastest") for n in RECORDINGS] + [(n, "onnxruntime") for n in IN_ONNXRUNTIME]
)
def test_training_equals_the_recording(name, placement):
    recording = Recording(name)
    trainer, losses, rates, results = recording.train(placement=placement)
    fused = isinstance(trainer._optimizer.updater._update, FusedAdam)
    assert fused == (placement == "fastest" and trainer._optimizer.updater.rule in (Adam("before"), Adam("none")))
    arrays = recording.arrays
    np.testing.assert_allclose(losses, arrays["losses"], rtol=0, atol=2e-6)
    np.testing.assert_array_equal(np.float64(rates), arrays["lrs"])
    state = trainer.state_dict()
    expected = {key[2:]: value for key, value in arrays.items() if key.startswith("w/")}
    assert state["model"]["full_precision"].keys() == expected.keys()
    for key, value in expected.items():
        got = state["model"]["full_precision"][key]
        np.testing.assert_allclose(got, value, rtol=0, atol=5e-6 * np.abs(value).max(), err_msg=key)
    # the user's module holds the trained weights
    module = trainer._combined.model
    assert all(
        np.array_equal(p.detach().numpy(), state["model"]["full_precision"][n]) for n, p in module.named_parameters()
    )
    for key, value in arrays.items():
        if not key.startswith("opt/"):
            continue
        _, weight, moment = key.split("/")
        got = state["optimizer"][weight][moment]
        assert got.shape == value.shape and got.dtype == value.dtype
        np.testing.assert_allclose(got, value, rtol=0, atol=2e-5 * max(np.abs(value).max(), 1e-6), err_msg=key)
    if "logits_last" in arrays:
        np.testing.assert_allclose(results[1].numpy(), arrays["logits_last"], rtol=0, atol=2e-5)
    counters = recording.settings.get("step_counters")
    if counters is not None:
        assert state["train_step_info"] == counters
        assert state["trainer_options"] == recording.settings["trainer_options"]
    if name in EVALUATED:
        assert_evaluation_equals(recording, trainer)


def assert_evaluation_equals(recording, trainer):
    before = {key: value.clone() for key, value in trainer.state_dict(True).items()}
    loss, logits = trainer.eval_step(*batches(recording.settings["model"], 1, recording.settings["eval_seed"])[0])
    np.testing.assert_allclose(float(loss), recording.arrays["eval_loss"], rtol=0, atol=2e-6)
    np.testing.assert_allclose(logits.numpy(), recording.arrays["eval_logits"], rtol=0, atol=2e-5)
    assert trainer._train_step_info.step == recording.settings["steps"]
    assert all(torch.equal(value, before[key]) for key, value in trainer.state_dict(True).items())
