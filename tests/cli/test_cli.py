"""LightningCLI with the strategy by name, by class path and from a file; the command ``lightning-ort``."""

from __future__ import annotations

import functools
import json
import os

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from modules import Classifier, TableData, table
from parity import STRATEGY, assert_in_ort, assert_same_metrics, assert_same_state, needs_ort, quiet, state_of

pytestmark = pytest.mark.stock_only

pytest.importorskip("jsonargparse")

QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.logger=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.max_steps=50",
    "--model.lr=0.02",
    "--seed_everything=7",
]


def run(*arguments: str, subcommand: str | None = "fit") -> LightningCLI:
    """The command line; without a subcommand, only what it makes."""
    torch._dynamo.reset()
    args = [*([] if subcommand is None else [subcommand]), *QUIET, *arguments]
    with quiet():
        return LightningCLI(Classifier, TableData, args=args, run=subcommand is not None, save_config_callback=None)


@pytest.fixture(scope="module")
def eager():
    """The same command line without a strategy."""
    cli = run()
    assert cli.trainer.global_step == 50
    return cli


def assert_same(eager: LightningCLI, cli: LightningCLI) -> None:
    assert_same_state(state_of(eager.model), state_of(cli.model))
    assert_same_metrics(eager.trainer.callback_metrics, cli.trainer.callback_metrics)
    assert_in_ort(cli.trainer)


def test_strategy_by_name(eager):
    assert_same(eager, run(f"--trainer.strategy={STRATEGY}"))


@needs_ort
def test_strategy_by_class_path(eager):
    cli = run(
        "--trainer.strategy=lightning_ort.ORTStrategy",
        '--trainer.strategy.providers=["CPUExecutionProvider"]',
        '--trainer.strategy.session_options={"intra_op_num_threads": 1}',
        "--trainer.strategy.on_unsupported=error",
    )
    assert type(cli.trainer.strategy).__name__ == "ORTStrategy"
    assert_same(eager, cli)


@needs_ort
def test_strategy_from_a_file(eager, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "trainer:\n"
        "  strategy:\n"
        "    class_path: lightning_ort.ORTStrategy\n"
        "    init_args:\n"
        "      providers: [CPUExecutionProvider]\n"
        "      verify: false\n"
        "      print_report: false\n"
    )
    assert_same(eager, run(f"--config={path}"))


@needs_ort
def test_options_of_torchs_module_in_a_configuration(eager, tmp_path, capsys):
    """By their names there, as for ``DDPStrategy``; what is not given stays as it is."""
    text = "trainer:\n  strategy:\n    class_path: lightning_ort.ORTStrategy\n    init_args: {{{}: {}}}\n"
    path = tmp_path / "config.yaml"
    path.write_text(text.format("find_unused_parameters", "true"))
    cli = run(f"--config={path}", "--trainer.devices=2", subcommand=None)
    given = cli.trainer.strategy._ddp_kwargs
    assert given["find_unused_parameters"] is True
    assert given["bucket_cap_mb"] == 25
    assert_same(eager, run(f"--config={path}"))
    path.write_text(text.format("find_unused", "true"))
    with pytest.raises(SystemExit):
        run(f"--config={path}")
    assert "find_unused" in capsys.readouterr().err


@needs_ort
def test_saved_configuration_starts_the_same_training(eager, tmp_path):
    """What the CLI saves can be given back to it."""
    cli = run("--trainer.strategy=lightning_ort.ORTStrategy", "--trainer.strategy.verify=false")
    path = tmp_path / "saved.yaml"
    path.write_text(cli._parser("fit").dump(cli.config.fit, skip_none=False))
    assert "lightning_ort" in path.read_text()
    again = run(f"--config={path}")
    assert_same(eager, again)


@needs_ort
def test_unknown_option_is_refused(capsys):
    with pytest.raises(SystemExit):
        run("--trainer.strategy=lightning_ort.ORTStrategy", "--trainer.strategy.provider=CPUExecutionProvider")
    assert "provider" in capsys.readouterr().err


def test_validate_subcommand():
    """The subcommands other than fit take the strategy as well."""
    results = [
        run(f"--trainer.strategy={strategy}", subcommand="validate").trainer.callback_metrics
        for strategy in ("auto", STRATEGY)
    ]
    assert results[0]["val_loss"] > 0.5
    assert_same_metrics(*results)


# -- the command lightning-ort -------------------------------------------------------------------------------------

CLASSES = ["--model=modules.Classifier", "--data=modules.TableData"]


def call(*arguments: str) -> int:
    from lightning_ort.cli import main

    torch._dynamo.reset()
    with quiet():
        return main(list(arguments))


@needs_ort
def test_command_trains_with_ort_by_default(eager, tmp_path):
    """Callbacks and plug-ins of this package are named without their modules."""
    from lightning_ort.cli import ORTCLI

    torch._dynamo.reset()
    callback = ["--trainer.callbacks+=ORTExport", f"--trainer.callbacks.path={tmp_path / 'm.onnx'}"]
    callback.append("--trainer.callbacks.dynamic={x: {0: rows}}")
    plugin = ["--trainer.plugins+=ORTPrecision", "--trainer.plugins.precision=32-true"]
    with quiet():
        cli = ORTCLI(args=["fit", *CLASSES, *QUIET, *callback, *plugin], save_config_callback=None)
    assert cli.status == 0 and type(cli.trainer.precision_plugin).__name__ == "ORTPrecision"
    assert_same(eager, cli)
    (export,) = (c for c in cli.trainer.callbacks if type(c).__name__ == "ORTExport")
    assert export.exported.inputs == {"x": ("rows", 12)} and export.exported.path == tmp_path / "m.onnx"


@needs_ort
@pytest.mark.parametrize("name", ["ORTStrategy", "lightning_ort.ORTStrategy"])
def test_a_configuration_names_the_strategy_with_or_without_its_module(name, tmp_path):
    from lightning_ort.cli import ORTCLI

    strategy = {"class_path": name, "init_args": {"print_report": False, "verify": False}}
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({"trainer": {"strategy": strategy, "fast_dev_run": True, "accelerator": "cpu"}}))
    torch._dynamo.reset()
    with quiet():
        cli = ORTCLI(args=["fit", f"--config={file}", *CLASSES], save_config_callback=None)
    assert cli.status == 0 and type(cli.trainer.strategy).__name__ == "ORTStrategy"
    assert not cli.trainer.strategy._verify


class _NamedTrainer(Trainer):
    def __init__(self, label: str = "none", **kwargs) -> None:
        super().__init__(**kwargs)
        self.label = label


@needs_ort
def test_a_trainer_class_of_ones_own(capsys, tmp_path, monkeypatch):
    from lightning_ort.cli import ORTCLI

    monkeypatch.chdir(tmp_path)
    with quiet():
        arguments = ["fit", *QUIET, "--trainer.max_steps=2", "--trainer.label=mine"]
        cli = ORTCLI(Classifier, TableData, trainer_class=_NamedTrainer, args=arguments, save_config_callback=None)
        assert isinstance(cli.trainer, _NamedTrainer) and cli.trainer.label == "mine" and cli.trainer.global_step == 2
        cli = ORTCLI(Classifier, TableData, trainer_class=_NamedTrainer, args=["examine"], save_config_callback=None)
    assert cli.status == 0 and isinstance(cli.trainer, _NamedTrainer)
    assert "training_step" in capsys.readouterr().out
    with pytest.raises(TypeError, match=r"trainer_class=.* is no class"):
        ORTCLI(Classifier, TableData, trainer_class=lambda **kwargs: Trainer(**kwargs), args=["fit"])


class PartlyInTorch(Classifier):
    """Whose validation needs an operator that ONNX cannot express."""

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        self.log("val_loss", torch.linalg.qr(self(x))[1].abs().mean())


class Fails(Classifier):
    def training_step(self, batch, batch_idx):
        raise KeyError("weights")


@needs_ort
def test_examine_finds_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(self, *args, **kwargs):
        raise AssertionError("a logger was made")

    monkeypatch.setattr(CSVLogger, "__init__", functools.wraps(CSVLogger.__init__)(write))
    logger = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs", "--trainer.callbacks+=ORTExport"]
    assert call("examine", *CLASSES, *logger, "--trainer.strategy=auto", "--trainer.max_steps=50") == 0
    printed = capsys.readouterr().out
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        assert f"{name}: all of it runs in ONNX Runtime" in printed
    assert "graph break: metrics are plain Python" in printed
    assert os.listdir(tmp_path) == []


@needs_ort
def test_examine_says_what_stays_in_torch_and_why(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Classifier().state_dict()}, "w.ckpt")
    flags = ["--trainer.strategy=lightning_ort.ORTStrategy", "--trainer.strategy.on_unsupported=error"]
    model = ["--model=test_cli.PartlyInTorch", "--data=modules.TableData", "--ckpt_path=w.ckpt"]
    assert call("examine", *model, *flags) == 1
    printed = capsys.readouterr().out
    assert "training_step: all of it runs in ONNX Runtime" in printed
    assert "validation_step: a part of it runs in torch, see above" in printed
    assert "in torch: aten.linalg_qr" in printed and "test_cli.py" in printed
    assert os.listdir(tmp_path) == ["w.ckpt"]


@needs_ort
def test_examine_of_a_step_that_fails(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("examine", "--model=test_cli.Fails", "--data=modules.TableData") == 2
    assert "KeyError: 'weights'" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


@needs_ort
def test_examine_leaves_the_strategy_and_its_precision(tmp_path, monkeypatch):
    from lightning_ort import ORTPrecision, ORTStrategy, examine

    monkeypatch.chdir(tmp_path)
    plugin = ORTPrecision("16-mixed")
    strategy, before = ORTStrategy(precision_plugin=plugin), plugin.state_dict()

    class Overflows(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * float("inf")

    with quiet():
        examine(Overflows(), train_dataloaders=table(), strategy=strategy, accelerator="cpu")
    assert plugin.state_dict() == before and strategy.precision_plugin is plugin


@needs_ort
def test_examine_from_python_leaves_the_module(tmp_path, monkeypatch):
    from lightning_ort import examine

    monkeypatch.chdir(tmp_path)

    class Small(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(12, 4)

        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Small()
    before = state_of(module)
    with quiet():
        found = examine(module, train_dataloaders=table(), accelerator="cpu")
    assert list(found.report) == ["training_step"] and found.report["training_step"].graphs == 1 and found.all_in_ort
    assert found.left_out == {
        "validation_step": "the module has none",
        "test_step": "the module has none",
        "predict_step": "there is no predict_dataloader",
    }
    assert "predict_step: not examined, there is no predict_dataloader" in str(found)
    assert_same_state(before, state_of(module), 0.0)
    assert module.layer.weight.grad is None and os.listdir(tmp_path) == []


@needs_ort
def test_examine_leaves_the_strategy():
    """It lists all that it finds, and what the user trains with afterwards still refuses."""
    from lightning_ort import ORTStrategy, UnsupportedError, examine

    class InTorch(Classifier):
        def training_step(self, batch, batch_idx):
            return torch.linalg.qr(self(batch[0]))[1].abs().mean()

        def configure_optimizers(self):
            return torch.optim.Rprop(self.parameters())

    strategy = ORTStrategy(on_unsupported="error", optimizer="ort", print_report=False)
    written = repr(strategy)
    with quiet():
        found = examine(InTorch(), train_dataloaders=table(), strategy=strategy, accelerator="cpu")
        assert found.report["training_step"].in_torch and not found.all_in_ort
        assert repr(strategy) == written and not strategy.report()
        with pytest.raises(UnsupportedError):
            Trainer(strategy=strategy, fast_dev_run=1, logger=False).fit(InTorch(), table())
