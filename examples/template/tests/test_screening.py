"""The project trains, and its ONNX model is the network of the best checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from screening.data import Tumours
from screening.model import Classifier

from lightning_ort.cli import main

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def data() -> Tumours:
    tumours = Tumours()
    tumours.setup("fit")
    return tumours


def test_no_tumour_is_in_two_parts(data):
    rows = torch.cat([part.tensors[0] for part in data.parts.values()])
    assert [len(part) for part in data.parts.values()] == [341, 114, 114]
    assert len(rows.unique(dim=0)) == len(rows)


def test_fit_ends_with_a_model_that_tells_tumours_apart(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["lightning-ort"])
    assert main(["fit", "--config=configs/defaults.yaml", f"--trainer.logger.init_args.save_dir={tmp_path}"]) == 0
    run = tmp_path / "default" / "version_0"
    printed = capsys.readouterr().out
    assert f"checkpoint    {run / 'checkpoints' / 'best.ckpt'}\nmodel         {run / 'model.onnx'}\n" in printed

    rows, labels = data.parts["test"].tensors
    session = onnxruntime.InferenceSession(run / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"measurements": rows.numpy()})
    assert np.mean(logits.argmax(1) == labels.numpy()) > 0.9

    module = Classifier.load_from_checkpoint(run / "checkpoints" / "best.ckpt", map_location="cpu").eval()
    with torch.no_grad():
        np.testing.assert_allclose(logits, module(rows), rtol=0, atol=1e-5)
