"""What ``lightning-ort`` says before it trains: commands, help, and mistakes in three lines."""

from __future__ import annotations

import os
import pickle
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch import LightningModule
from modules import Classifier
from parity import needs_ort, quiet

from lightning_ort.optim import AdamW

pytestmark = pytest.mark.stock_only

pytest.importorskip("jsonargparse")

ROOT = Path(__file__).parents[2]
COMMANDS = ("fit", "validate", "test", "predict", "examine", "bench", "doctor", "cache", "new")
MODEL = ["--model=modules.Classifier", "--data=modules.TableData"]


class Refuses(Classifier):
    def __init__(self) -> None:
        raise ValueError("a mistake in the module")


def call(*arguments: str) -> int:
    from lightning_ort.cli import main

    try:
        with quiet():
            return main(list(arguments))
    except SystemExit as ended:
        return int(ended.code or 0)


def refused(capsys, *arguments: str) -> tuple[str, str, str]:
    """What was wrong, what was expected, and what to do."""
    assert call(*arguments) == 2
    lines = capsys.readouterr().err.splitlines()[-3:]
    found = [re.fullmatch(r"(?:wrong|expected|to do): +(.*)", line) for line in lines]
    assert all(found), lines
    return tuple(match[1] for match in found)


def python(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, *arguments, *([] if code is None else ["-c", code])]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


# -- start ---------------------------------------------------------------------------------------------------------


def test_version(capsys):
    import lightning_ort
    from lightning_ort.cli import main

    project = (ROOT / "pyproject.toml").read_text()
    (target,) = re.findall(r'^lightning-ort = "(.+)"$', project, re.MULTILINE)
    assert pkgutil.resolve_name(target) is main
    assert call("--version") == 0
    assert capsys.readouterr().out == f"{lightning_ort.__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["doctor", "--help"], ["cache", "--help"], ["new", "--help"], ["ftt"]]
)
def test_that_what_needs_no_torch_does_not_wait_for_it(arguments):
    run = python("-X", "importtime", "-m", "lightning_ort", *arguments)
    assert run.returncode == (2 if arguments == ["ftt"] else 0)
    imported = set(re.findall(r"\| +(\w+)$", run.stderr, re.MULTILINE))
    assert "lightning_ort" in imported and not imported & {"torch", "lightning", "numpy", "onnx", "onnxruntime"}


def test_that_a_console_script_does_not_wait_for_torch():
    start = "import sys; sys.argv = ['/usr/bin/lightning-ort', '--version']; from lightning_ort.cli import main; main()"
    assert python(code=f"{start}; print('torch' in sys.modules)").stdout.split()[1:] == ["False"]


def test_that_an_import_registers_the_strategy():
    """Also where another module is run by ``-m``, and where the package is named after ``lightning_ort``."""
    code = """if True:
        import os, sys
        from lightning.pytorch.strategies import StrategyRegistry
        for sys.argv in (["x.py"], ["-m", "fit"], ["/home/lightning-ort/x.py"], []):
            if not os.fork():
                import lightning_ort
                print("ort" in StrategyRegistry, flush=True)
                os._exit(0)
            os.wait()
    """
    assert python(code=code).stdout == "True\n" * 4


def test_doctor_where_torch_is_broken():
    code = "import sys; sys.argv = ['lightning-ort']; sys.modules['torch'] = None\n"
    run = python(code=code + "from lightning_ort.cli import main; print(main(['doctor']), main(['fit']))")
    assert "problem  Execution providers are not tried: " in run.stdout and run.stdout.endswith("1 2\n")
    assert "torch" in run.stderr and "See also: lightning-ort doctor" in run.stderr
    assert "Traceback" not in run.stderr


def test_all_public_names_are_found():
    import lightning_ort

    assert set(lightning_ort.__all__) <= set(dir(lightning_ort))
    assert all(getattr(lightning_ort, name) is not None for name in lightning_ort.__all__)
    with pytest.raises(AttributeError, match="no attribute 'ORTStrateggy'"):
        _ = lightning_ort.ORTStrateggy


def test_help_names_all_commands(capsys):
    assert call("--help") == 0
    usage, _, described = capsys.readouterr().out.partition("commands:")
    assert f"{{{','.join(COMMANDS)}}}" in usage
    assert re.findall(r"^    (\w+) ", described, re.MULTILINE) == list(COMMANDS)
    assert call() == 2
    assert "usage: lightning-ort" in capsys.readouterr().err


# -- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [[], ["--config=c.yaml"]])
def test_a_wrong_command(before, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("fit: {}")
    wrong, expected, remedy = refused(capsys, *before, "doktor")
    assert wrong == "doktor is no command" and expected == f"one of {', '.join(COMMANDS)}"
    assert remedy.startswith("lightning-ort doctor, if that was meant")


def test_the_extra_that_is_missing(monkeypatch, capsys):
    import lightning.pytorch.cli as module

    absent = type("Absent", (SimpleNamespace,), {"__bool__": lambda self: False})(requirement="jsonargparse[x]>=4")
    monkeypatch.setattr(module, "_JSONARGPARSE_SIGNATURES_AVAILABLE", absent)
    for arguments in (["fit", "--config=no.yaml"], ["fit", "--help"]):
        assert call(*arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith("The command line needs the extra [cli] of this package, jsonargparse[x]>=4, which is ")
        assert 'pip install "jsonargparse[x]>=4"\n' in said and "usage" not in said


@needs_ort
@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        (["--trainer.devices=x"], ("trainer.devices is 'x'", "should be an int > 0", "command line")),
        (["--trainer.devics=1"], ("--trainer.devics is no option of lightning-ort fit", "trainer.devices", "--help")),
        (["--trainer.max_epochs=x"], ("trainer.max_epochs is x", "int or null", "trainer.max_epochs")),
        (["--trainer.precision=17"], ("trainer.precision is 17", "or 16-true or 16-mixed or", "trainer.precision")),
        (["--trainer.accelerator=no"], ("trainer.accelerator is 'no'", "Available names are", "command line")),
        (["--trainer.devices=0"], ("trainer.devices is '0'", "not a valid input", "command line")),
        (["--trainer.limit_train_batches=-1"], ("trainer.limit_train_batches is -1", "[0.0, 1.0]", "command line")),
        (["--trainer.max_epochs"], ("--trainer.max_epochs has no value", "one argument", "--trainer.max_epochs=")),
        (["--trainer.logger=Nope"], ("trainer.logger is Nope, which is no class", "package.module.Class", "logger")),
        (["--ckpt_path=no.ckpt"], ("ckpt_path is 'no.ckpt', and there is no such file in /", "or last", "the path")),
        (["--model.lrr=1"], ("modules.Classifier has no argument lrr", "lr, if that was meant", "--model.lrr")),
        (["--model.lr=x"], ("lr is x, for modules.Classifier", "float", "correct model.lr")),
        (["--model=modules.Absent"], ("model is modules.Absent: module 'modules' has no", "package.module", "model")),
        (["--model=absent.Model"], ("model is absent.Model: No module named 'absent'", "package.module", "folder")),
        (
            ["--trainer.strategy=lightning_ort.ORTStrategy", "--trainer.strategy.placement=quick"],
            ("placement is quick, for lightning_ort.ORTStrategy", "fastest or fastest+inductor or", "placement"),
        ),
        (
            ["--trainer.strategy=lightning_ort.ORTStrategy", "--trainer.strategy.session_options={a: 3}"],
            ("an option of the trainer is refused", "session_options has no 'a'", "command line"),
        ),
        (
            ["--trainer.plugins+=ORTPrecision", "--trainer.plugins.precision=17"],
            ("precision is 17, for lightning_ort.ORTPrecision", "32-true or 64-true or", "plugins.precision"),
        ),
        (["--optimizer=torch.optim.SGD", "--optimizer.lr=fast"], ("lr is fast, for torch.optim.SGD", "float", "lr")),
        (["--trainer.strategy=orrt"], ("trainer.strategy is 'orrt'", "ort, or another name", "command line")),
        (["again"], ("again is no option of lightning-ort fit", "by its full name", "lightning-ort fit --help")),
    ],
    ids=lambda value: value[-1].partition("=")[0].lstrip("-") if isinstance(value, list) else "",
)
def test_mistakes_on_the_command_line(arguments, mistake, capsys):
    lines = refused(capsys, "fit", *MODEL, *arguments)
    for said, part in zip(lines, mistake, strict=True):
        assert part in said


@needs_ort
@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        (None, ("c.yaml: file does not exist", "YAML or JSON", "correct the path")),
        ("trainer: {max_epoch: 3}\n", ("trainer.max_epoch is no option of lightning-ort fit", "max_epochs", "--help")),
        ("trainer: {max_epochs: [3\n", ("cannot be read: while parsing a flow sequence", "YAML", "that line")),
        ("- 3\n", ("cannot be read: - 3", "trainer, model and data", "that line")),
        ("trainer: {}\n", ("there is no model", "or as --model=", "lightning-ort new")),
        (
            "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitor: a, patience: x}}]}\n",
            ("patience is x, for lightning.pytorch.callbacks.EarlyStopping", "int", "patience"),
        ),
        (
            "model: {class_path: modules.Classifier, init_args: {sizes: 3, lr: 0.1}}\n",
            ("modules.Classifier has no argument sizes", "one of lr", "below model"),
        ),
    ],
    ids=["missing", "key", "yaml", "list", "model", "value", "argument"],
)
def test_mistakes_in_a_configuration(text, mistake, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("c.yaml").write_text(text)
    for said, part in zip(refused(capsys, "fit", "--config=c.yaml"), mistake, strict=True):
        assert part in said


@needs_ort
def test_mistakes_of_a_module_keep_their_traceback(monkeypatch):
    with pytest.raises(ValueError, match="a mistake in the module"):
        call("fit", "--model=test_command.Refuses", "--data=modules.TableData")


@needs_ort
def test_tracebacks_for_those_who_ask(monkeypatch):
    monkeypatch.setenv("JSONARGPARSE_DEBUG", "true")
    with pytest.raises(TypeError, match="should be an int"):
        call("fit", *MODEL, "--trainer.devices=x")
    with pytest.raises(Exception, match=r"Expected a .*int"):
        call("fit", *MODEL, "--trainer.max_epochs=x")


@pytest.mark.parametrize(
    "arguments",
    [
        ("cache", "--clea"),
        ("doctor", "--hel"),
        ("new", "never", "--hel"),
        ("--vers",),
        ("fit", *MODEL, "--trainer.max_ep=1"),
    ],
)
def test_abbreviations_are_no_options(arguments, capsys):
    assert call(*arguments) == 2
    assert arguments[-1].partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize("command", ["cache", "doctor"])
def test_who_reads_the_output_has_gone(command):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        ended = subprocess.run([sys.executable, "-m", "lightning_ort", command], stdout=pipe, stderr=subprocess.PIPE)
    assert ended.returncode == 141 and not ended.stderr


@pytest.mark.parametrize("name", ["AdamW", "lightning_ort.optim.AdamW"])
def test_short_names_are_torchs(name, tmp_path, monkeypatch):
    """This package has an AdamW, too, which is found by its path alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Classifier, "configure_optimizers", LightningModule.configure_optimizers)
    assert call("fit", *MODEL, f"--optimizer={name}", "--trainer.fast_dev_run=1", "--trainer.accelerator=cpu") == 0
    assert pickle.loads(pickle.dumps(AdamW)) is AdamW
