"""``examine(measure=True)``: a training as short as measuring allows, that leaves nothing but what was measured."""

from __future__ import annotations

import json
import os

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.demos.boring_classes import RandomIterableDataset
from modules import Classifier, table
from parity import assert_same_state, needs_ort, quiet, state_of

from lightning_ort import ORTPrecision, ORTStrategy, examine
from lightning_ort.compiler import contest
from lightning_ort.lightning import examine as module_of_examine
from lightning_ort.lightning.turns import Turns

pytestmark = [needs_ort, pytest.mark.stock_only]

LOADERS = {
    "train_dataloaders": table,
    "val_dataloaders": table,
    "test_dataloaders": table,
    "predict_dataloaders": table,
}


def examined(module, loaders=("train",), **flags):
    """What is found with data for ``loaders``."""
    torch._dynamo.reset()
    given = {name: make() for name, make in LOADERS.items() if name.partition("_")[0] in loaders}
    with quiet():
        return examine(module, accelerator="cpu", measure=True, **given, **flags)


class Scheduled(Classifier):
    """Whose schedule ends with the training that was asked for, and whose own callback would end it at once."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=int(steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def configure_callbacks(self):
        return [EarlyStopping("train_loss", patience=0, divergence_threshold=-1.0, check_on_train_epoch_end=True)]


def test_who_is_fastest_and_how_long_steps_take(measuring, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.chdir(tmp_path)
    module = Scheduled()
    before = state_of(module)
    found = examined(module, ("train", "val", "test", "predict"), max_epochs=2)
    assert_same_state(before, state_of(module), 0.0)
    step = found.report["training_step"]
    assert step.turns and step.measured and {"onnxruntime", "eager"} <= set(step.measured[0])
    figures = step.figures()
    assert len(step.timing.calls) >= 8 and figures.speed > 0 and sum(figures.shares.values()) == pytest.approx(1)
    assert step.calls < 2000  # ends when all is known, of at most 400 calls in turns and some that are timed
    for name in ("validation_step", "test_step", "predict_step"):
        assert 32 <= found.report[name].calls < 32 + len(table())
        assert len(found.report[name].timing.calls) >= 8
    assert found.all_supported and not found.left_out
    text = str(found)
    assert "measured: ONNX Runtime" in text and "in torch alone about" in text and "training_step: all of it" in text
    # what a training finds, and nothing else, is kept for it
    assert os.listdir(tmp_path) == ["cache"]
    choices = [json.loads(path.read_text()) for path in cache.rglob("*") if path.is_file() and "choices" in path.parts]
    assert choices


def test_it_ends_after_a_while(measuring, monkeypatch):
    monkeypatch.setattr(module_of_examine, "_PATIENCE", 0.0)
    found = examined(Classifier(), max_epochs=1, min_epochs=5)
    assert found.report["training_step"].calls <= 2
    assert not found.report["training_step"].turns


class Skips(Classifier):
    def on_train_batch_start(self, batch, batch_idx):
        return -1


@pytest.mark.parametrize("data", ["skipped", "none"])
def test_it_ends_where_there_is_nothing_to_measure(data, measuring):
    nothing = torch.utils.data.DataLoader(RandomIterableDataset(12, 0))
    with quiet():
        found = (
            examined(Skips()) if data == "skipped" else
            examine(Classifier(), train_dataloaders=nothing, accelerator="cpu", measure=True)
        )  # fmt: skip
    assert found.left_out["training_step"] == "train_dataloader has no batches"


@pytest.mark.parametrize("how", ["deterministic", "placement", "on_unsupported", "scaled"])
def test_steps_are_timed_where_a_training_compares_nothing(how, measuring, monkeypatch):
    monkeypatch.setattr(contest, "_PROMISING", 1.01)  # a busy machine makes torch come near to a half
    options = {
        "placement": {"placement": "onnxruntime"},
        "on_unsupported": {"on_unsupported": "error"},
        "scaled": {"precision_plugin": ORTPrecision("16-mixed")},
    }
    flags = {"deterministic": True} if how == "deterministic" else {}
    try:
        found = examined(Classifier(), strategy=ORTStrategy(**options.get(how, {})), **flags)
    finally:
        torch.use_deterministic_algorithms(False)
    step = found.report["training_step"]
    assert not step.turns and all(list(times) == ["onnxruntime"] for times in step.measured)
    assert len(step.timing.calls) >= 8 and step.figures().seconds_in_torch is None
    assert "in torch alone: unknown" in str(found)


def test_torch_by_choice_is_no_want_of_support(measuring):
    found = examined(Classifier(), strategy=ORTStrategy(placement="torch"))
    assert found.all_supported and not found.all_in_ort
    assert "training_step: all of it can run in ONNX Runtime; 1 of 1 graphs run in torch by choice" in str(found)


def test_a_step_that_is_faster_as_it_is(measuring, monkeypatch):
    def decide(turns):
        turns.decided = turns.step.as_it_is = True
        turns.step.turns = {"graphs": 2.0, "eager": 1.0}

    monkeypatch.setattr(Turns, "_meet", lambda turns, elements: decide(turns))
    found = examined(Classifier())
    step = found.report["training_step"]
    assert step.figures() is not None and step.figures().speed == 1.0
