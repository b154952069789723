"""The example of the README: it trains, tests and exports."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

pytestmark = pytest.mark.stock_only

EXAMPLE = Path(__file__).parent.parent / "examples" / "digits.py"


def test_digits_are_told_apart_by_the_exported_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "digits.onnx"
    monkeypatch.setattr(sys, "argv", ["digits.py", "--epochs", "2", "--output", str(path)])
    example = runpy.run_path(str(EXAMPLE))
    example["main"]()
    printed = capsys.readouterr().out
    assert "Steps in ONNX Runtime" in printed and f"Wrote {path}" in printed
    data = example["Digits"]()
    data.setup("test")
    images, labels = (t.numpy() for t in data.test.tensors)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {session.get_inputs()[0].name: images})
    accuracy = np.mean(logits.argmax(1) == labels)
    assert accuracy > 0.9 and f"accuracy on 360 test images: {accuracy:.4f}" in printed
