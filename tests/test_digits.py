"""The examples with digits: they train and test, in PyTorch and in ONNX Runtime, and one exports."""

from __future__ import annotations

import logging
import os
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

pytestmark = pytest.mark.stock_only

EXAMPLE = Path(__file__).parent.parent / "examples" / "digits.py"


@pytest.fixture
def loggers():
    """What the example silences is heard again."""
    found = [logging.getLogger(name) for name in ("lightning.fabric", "lightning.pytorch")]
    levels = [logger.level for logger in found]
    yield
    for logger, level in zip(found, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.usefixtures("loggers")
def test_digits_are_told_apart_by_the_exported_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["digits.py", "--epochs", "2"])
    example = runpy.run_path(str(EXAMPLE))
    example["main"]()
    printed = capsys.readouterr()
    assert printed.out.count("Steps in ONNX Runtime") == 1 and "Epoch 1/1" not in printed.out + printed.err
    path = Path("digits") / "model.onnx"
    assert f"Wrote {path}; its logits are within" in printed.out
    assert os.listdir() == ["digits"] and os.listdir("digits") == ["model.onnx"]
    titles, auto, ort = printed.out.splitlines()[-5:-2]
    assert titles.split() == ["strategy", "fit", "first", "epoch", "a", "later", "one", "accuracy"]
    assert auto.split()[0] == "auto" and ort.split()[0] == "ort"
    data = example["Digits"]()
    data.setup("test")
    images, labels = (t.numpy() for t in data.test.tensors)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {session.get_inputs()[0].name: images})
    accuracy = np.mean(logits.argmax(1) == labels)
    assert accuracy > 0.9 and ort.split()[-1] == f"{accuracy:.4f}"
    assert float(auto.split()[-1]) == pytest.approx(accuracy, abs=0.01)


def test_the_first_epoch_may_be_the_only_one(capsys):
    example = runpy.run_path(str(EXAMPLE))
    example["print_table"]({"ort": example["Training"](None, 1.25, [1.0], 0.5)})
    assert capsys.readouterr().out.splitlines()[-1].split() == ["ort", "1.2", "s", "1.00", "s", "-", "0.5000"]


@pytest.mark.usefixtures("loggers")
def test_a_loop_of_fabric_goes_on_with_the_checkpoint_of_another_strategy(tmp_path, monkeypatch, capsys):
    for strategy, epochs in (("ort", "2"), ("auto", "3")):
        arguments = ["--strategy", strategy, "--epochs", epochs, "--checkpoint", str(tmp_path / "digits.ckpt")]
        monkeypatch.setattr(sys, "argv", ["fabric_loop.py", *arguments])
        runpy.run_path(str(EXAMPLE.with_name("fabric_loop.py")))["main"]()
    printed = capsys.readouterr().out
    accuracies = [float(x) for x in re.findall(r"^epoch \d: .*, ([\d.]+)% of the test images$", printed, re.M)]
    assert len(accuracies) == 3 and min(accuracies[1:]) > 90
    assert "Classifier.forward" in printed
