"""``lightning-ort bench``: what it prints and how it ends, not how fast anything is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from modules import Classifier, TableData
from parity import quiet

pytestmark = pytest.mark.either_build

pytest.importorskip("jsonargparse")

HELPERS = Path(__file__).parents[1] / "helpers"
QUICK = ["--rounds=1", "--seconds=0", "--steps=2", "--warmup_steps=2", "--threads=1", "--seed_everything=7"]


class Fails(Classifier):
    def training_step(self, batch, batch_idx):
        raise KeyError("weights")


class Scheduled(Classifier):
    """Ends after an epoch, with a schedule that waits for a validation, and callbacks that would stop or write."""

    def configure_optimizers(self):
        assert self.trainer.max_epochs == 1
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    def configure_callbacks(self):
        raise AssertionError("a callback was asked for")

    def training_step(self, batch, batch_idx):
        print("a line among the replies")
        return super().training_step(batch, batch_idx)


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), str(Path(__file__).parent), *sys.path]))
    with quiet():
        yield tmp_path


def call(*arguments: str) -> int:
    from lightning_ort.cli import main

    return main(["bench", *arguments, *QUICK])


@pytest.mark.slow
def test_strategies_of_a_configuration_are_compared(project, capsys):
    (project / "config.yaml").write_text(
        "trainer: {accelerator: cpu, max_epochs: 1, precision: bf16-mixed, callbacks: [{class_path: EarlyStopping, "
        "init_args: {monitor: none}}], strategy: {class_path: lightning_ort.ORTStrategy, init_args: {verify: false}}}\n"
        "model: {class_path: test_bench.Scheduled}\n"
        "data: {class_path: modules.TableData}\n"
        "ckpt_path: null\n"
    )
    assert call("--config=config.yaml", "--strategies=[ort]") == 0
    printed = capsys.readouterr().out
    assert "Scheduled" in printed and "bf16-mixed" in printed
    assert "auto" in printed and "ort" in printed and "compile+" not in printed
    assert "Use strategy='" in printed
    assert os.listdir(project) == ["config.yaml"]


@pytest.mark.slow
def test_a_module_that_fails(project, capfd):
    assert call("--model=test_bench.Fails", "--data=modules.TableData", "--strategies=[auto]") == 2
    said = capfd.readouterr().err
    assert "The training fails, whatever the strategy" in said and "KeyError: 'weights'" in said


def test_a_configuration_that_is_wrong(project, capsys):
    for arguments, message in (
        (["--config=absent.yaml"], "absent.yaml"),
        (["--data=modules.TableData"], "model"),
        (["--model=modules.Classifier", "--strategies=[fast]"], "fast"),
        (["--model=modules.Absent"], "Absent"),
    ):
        with pytest.raises(SystemExit) as ended:
            call(*arguments)
        assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--rounds=0", "--steps=1", "--warmup_steps=0", "--seconds=-1", "--threads=0"])
def test_settings_that_measure_nothing(project, capsys, option):
    from lightning_ort.cli import main

    assert main(["bench", "--model=modules.Classifier", "--data=modules.TableData", "--seed_everything=7", option]) == 2
    assert option.partition("=")[0].strip("-") in capsys.readouterr().err


def test_bench_of_a_program_that_gives_the_arguments(project):
    from lightning_ort.cli import ORTCLI

    with pytest.raises(MisconfigurationException, match="run bench from a shell"):
        ORTCLI(Classifier, TableData, args=["bench", *QUICK])


def test_children_train_as_the_configuration_says():
    """What the Trainer of a child gets: the options of the user's strategy stay, what ends or writes goes."""
    from types import SimpleNamespace

    from lightning_ort import ORTStrategy
    from lightning_ort.cli.bench import bench_flags

    given = {"strategy": ORTStrategy(verify=False), "max_epochs": 3}
    for name, placement in (("ort", "fastest"), ("ort+inductor", "fastest+inductor")):
        child = SimpleNamespace(strategy=name, turns="turns")
        strategy = bench_flags(given, child, "folder")["strategy"]
        assert strategy is given["strategy"] and strategy._config.placement == placement
    assert bench_flags({"strategy": "ort"}, SimpleNamespace(strategy="auto", turns="turns"), "x")["strategy"] == "auto"
