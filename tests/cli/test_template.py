"""The team template in examples/template: its commands, its configurations, its sweep, and ``lightning-ort new``."""

from __future__ import annotations

import csv
import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from parity import needs_ort, quiet

pytest.importorskip("jsonargparse")
pytestmark = [needs_ort, pytest.mark.either_build]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def template(tmp_path, monkeypatch):
    """A copy of the template, as the current folder.

    Its modules stay imported, for the next copy too: jsonargparse names every subclass of a Callback that the process
    has by the module to import it from, and warns of those that are gone.
    """
    from lightning_ort.cli import main

    folder = tmp_path / "template"
    assert main(["new", str(folder)]) == 0
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the current folder
    return folder


def sweep_of(template: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("sweep", template / "sweep.py")
    sweep = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sweep)
    return sweep


def metrics(folder: Path, name: str) -> list[float]:
    with open(folder / "metrics.csv") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def test_commands_of_the_readme(template, capsys):
    """Two configurations and one value, then a test; models are found in the current folder."""
    from lightning_ort.cli import main

    fit = "lightning-ort fit --config configs/defaults.yaml --config configs/experiments/wide.yaml"
    test = "lightning-ort test --config runs/wide/version_0/config.yaml --ckpt_path "
    test += "runs/wide/version_0/checkpoints/best.ckpt --trainer.logger=false"
    assert {fit, test} <= set((template / "README.md").read_text().splitlines())
    torch._dynamo.reset()
    with quiet():
        assert main([*fit.split()[1:], "--model.init_args.dropout=0.2"]) == 0
    folder = template / "runs" / "wide" / "version_0"
    assert {"config.yaml", "metrics.csv", "model.onnx", "checkpoints"} <= set(os.listdir(folder))
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    model = {"features": 30, "width": 128, "depth": 1, "dropout": 0.2}
    assert settings["model"] == {"class_path": "screening.model.Classifier", "init_args": model}
    assert settings["trainer"]["strategy"]["class_path"] == "lightning_ort.ORTStrategy"
    losses, accuracies = metrics(folder, "val_loss"), metrics(folder, "val_accuracy")
    assert len(losses) == 10 and max(accuracies) > 0.93
    best = losses.index(min(losses))
    assert capsys.readouterr().out.splitlines()[-5:] == [
        f"best epoch    {best + 1} of 10",
        f"val_loss      {losses[best]:.4f}",
        f"val_accuracy  {accuracies[best]:.4f}",
        "checkpoint    runs/wide/version_0/checkpoints/best.ckpt",
        "model         runs/wide/version_0/model.onnx",
    ]

    files = sorted(template.rglob("*"))
    for _ in range(2):  # what a first one left would be in the way of the second
        with quiet(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert main(test.split()[1:]) == 0
        assert not [each for each in told if "dirpath" in str(each.message)], "no checkpoint is written"
    assert "test_accuracy" in capsys.readouterr().out
    assert sorted(template.rglob("*")) == files


def test_sweep_exports_the_best_of_each_run(template, monkeypatch, capsys):
    sweep = sweep_of(template)
    assert [len(values) for values in sweep.SETTINGS.values()] == [2, 2]
    key = "optimizer.init_args.lr"
    monkeypatch.setattr(sweep, "SETTINGS", {**sweep.SETTINGS, "model.init_args.width": [16], key: [1e-3, 1e-2]})
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--trainer.max_epochs=3"])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    torch._dynamo.reset()
    capsys.readouterr()
    sweep.main()
    printed = capsys.readouterr()
    first, second, _, titles, *lines, _, last = printed.out.splitlines()
    assert [first, second] == ["trained 1 of 2: width=16,lr=0.001", "trained 2 of 2: width=16,lr=0.01"]
    assert titles.split() == ["val_loss", "run"] and printed.err == ""
    assert last == "There is no picture, which needs matplotlib: pip install matplotlib"
    lines = [line.split() for line in lines]
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


def test_a_sweep_draws_its_losses(template):
    image = pytest.importorskip("matplotlib.image")
    sweep = sweep_of(template)
    runs = [sweep.Run(f"lr={lr}", template, [{"val_loss": lr}, {"val_loss": lr / 2}], lr / 2) for lr in (0.1, 0.3)]
    sweep.draw(runs, template / "sweep.png")
    picture = image.imread(template / "sweep.png")
    assert picture.shape[:2] == (675, 1050) and picture.std() > 0.05


def test_a_new_project_passes_its_tests(template):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and "2 passed" in run.stdout, run.stdout


def test_a_project_is_not_written_over_another(template, capsys):
    from lightning_ort.cli import main

    capsys.readouterr()
    (template / "README.md").write_text("mine")
    assert main(["new", str(template)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"wrong:    {template} is not empty: it has .gitignore, README.md, configs, ... (")
    assert "expected: a folder that is not there yet, or is empty\nto do:    give another name" in said
    assert (template / "README.md").read_text() == "mine"
    assert main(["new", str(template / "README.md")]) == 2
    assert "README.md is a file" in capsys.readouterr().err
    (template / "empty").mkdir()
    assert main(["new", str(template / "empty")]) == 0
    assert (template / "empty" / "sweep.py").is_file() and not (template / "empty" / "runs").exists()


@pytest.mark.slow
def test_two_processes(template):
    """Each has half of the training rows; metrics are of all validation rows, and one of them writes and prints."""
    command = "lightning-ort fit --config configs/defaults.yaml --config configs/two_processes.yaml"
    assert command in (template / "README.md").read_text().splitlines()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{template}", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-m", "lightning_ort", *command.split()[1:]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.count("best epoch") == 1
    run = template / "runs" / "two_processes" / "version_0"
    assert [path.name for path in run.parent.iterdir()] == ["version_0"]
    checkpoint = torch.load(run / "checkpoints" / "best.ckpt", weights_only=False)
    # ten batches of sixteen rows in each half of 341
    assert checkpoint["global_step"] % 10 == 0
    assert max(metrics(run, "val_accuracy")) > 0.93
    rows = np.zeros((3, 30), np.float32)
    session = onnxruntime.InferenceSession(run / "model.onnx", providers=["CPUExecutionProvider"])
    assert session.run(["logits"], {"measurements": rows})[0].shape == (3, 2)
