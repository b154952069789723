"""The team template in examples/template: its commands, its configurations and its sweep."""

from __future__ import annotations

import csv
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from parity import needs_ort, quiet

pytest.importorskip("jsonargparse")
pytestmark = needs_ort

ROOT = Path(__file__).parents[2]


@pytest.fixture
def template(tmp_path, monkeypatch):
    """A copy of the template, as the current folder."""
    folder = tmp_path / "template"
    shutil.copytree(ROOT / "examples" / "template", folder, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the current folder
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "screening"]:
        del sys.modules[name]


def metrics(folder: Path, name: str) -> list[float]:
    with open(folder / "metrics.csv") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def test_command_of_the_readme(template):
    """Two configurations and one value; models are found in the current folder."""
    from lightning_ort.cli import main

    command = "lightning-ort fit --config configs/defaults.yaml --config configs/experiments/wide.yaml"
    assert command in (template / "README.md").read_text()
    torch._dynamo.reset()
    with quiet():
        assert main([*command.split()[1:], "--model.init_args.dropout=0.2"]) == 0
    folder = template / "runs" / "wide" / "version_0"
    assert {"config.yaml", "metrics.csv", "model.onnx", "checkpoints"} <= set(os.listdir(folder))
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    model = {"features": 30, "width": 128, "depth": 1, "dropout": 0.2}
    assert settings["model"] == {"class_path": "screening.model.Classifier", "init_args": model}
    assert settings["trainer"]["strategy"]["class_path"] == "lightning_ort.ORTStrategy"
    assert len(metrics(folder, "val_loss")) == 10 and max(metrics(folder, "val_accuracy")) > 0.93


def test_sweep_exports_the_best_of_each_run(template, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("sweep", template / "sweep.py")
    sweep = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sweep)
    assert [len(values) for values in sweep.SETTINGS.values()] == [2, 2]
    key = "optimizer.init_args.lr"
    monkeypatch.setattr(sweep, "SETTINGS", {**sweep.SETTINGS, "model.init_args.width": [16], key: [1e-3, 1e-2]})
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--trainer.max_epochs=3"])
    torch._dynamo.reset()
    with quiet():
        sweep.main()
    _, *lines = [
        line.split() for line in capsys.readouterr().out.splitlines() if "width=" in line or "val_loss" in line
    ]
    assert [line[1] for line in lines] == ["width=16,lr=0.01", "width=16,lr=0.001"]
    best = template / "runs" / "width=16,lr=0.01" / "version_0"
    losses = metrics(best, "val_loss")
    assert len(losses) == 3 and min(losses) == pytest.approx(float(lines[0][0]), abs=1e-4)

    from screening.data import Tumours
    from screening.model import Classifier

    data = Tumours()
    data.setup("test")
    x = data.parts["test"].tensors[0]
    module = Classifier.load_from_checkpoint(best / "checkpoints" / "best.ckpt", map_location="cpu").eval()
    session = onnxruntime.InferenceSession(best / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"measurements": x.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(logits, module(x), rtol=0, atol=1e-5)


def test_other_experiment(template, capsys):
    from lightning_ort.cli import main

    configurations = ["--config=configs/defaults.yaml", "--config=configs/experiments/sgd.yaml"]
    with quiet(), pytest.raises(SystemExit) as ended:
        main(["fit", *configurations, "--print_config"])
    assert ended.value.code == 0
    settings = yaml.safe_load(capsys.readouterr().out)
    assert settings["optimizer"]["class_path"] == "torch.optim.SGD"
    assert settings["optimizer"]["init_args"]["momentum"] == 0.9
    assert settings["lr_scheduler"]["class_path"] == "torch.optim.lr_scheduler.CosineAnnealingLR"
    assert settings["trainer"]["logger"]["init_args"]["name"] == "sgd"
    assert settings["trainer"]["max_epochs"] == settings["lr_scheduler"]["init_args"]["T_max"] == 10
