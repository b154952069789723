"""LightningCLI: the strategy by name, by class path, and from a YAML file."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from modules import Classifier, TableData
from parity import STRATEGY, assert_in_ort, assert_same_metrics, assert_same_state, needs_ort, quiet, state_of

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


def run(*arguments: str, subcommand: str = "fit") -> LightningCLI:
    torch._dynamo.reset()
    with quiet():
        return LightningCLI(Classifier, TableData, args=[subcommand, *QUIET, *arguments], save_config_callback=None)


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
