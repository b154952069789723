"""``lightning-ort doctor`` on made-up installations, on one without ONNX Runtime, and on the real one."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_ort import environment
from lightning_ort.cli import doctor, main
from lightning_ort.environment import OnnxRuntime, OnnxRuntimeConflictError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def processes_meet(request, monkeypatch):
    """Without starting any, but where that is tested."""
    if "processes" not in request.node.name:
        monkeypatch.setattr(doctor, "meet", lambda: None)


def listing(capsys) -> str:
    return capsys.readouterr().out


def test_the_real_installation(capsys):
    import onnxruntime

    assert main(["doctor"]) == 0
    printed = listing(capsys)
    assert sys.executable in printed and printed.endswith("Nothing is wrong.\n")
    assert f"ok       ONNX Runtime {onnxruntime.__version__} (onnxruntime" in printed
    assert "ok       CPUExecutionProvider works\n" in printed
    assert f"torch {importlib.metadata.version('torch')}" in printed  # which may lack the +cu130 of torch.__version__


def test_what_the_environment_refuses_is_a_problem(monkeypatch, capsys):
    def refuse():
        raise OnnxRuntimeConflictError("Two of them.", ["pip uninstall one", "pip uninstall other"])

    monkeypatch.setattr(doctor, "require_onnxruntime", refuse)
    assert doctor.doctor() == 1
    lines = listing(capsys).splitlines()
    assert lines[1:4] == [
        "problem  Two of them.",
        "         -> pip uninstall one",
        "         or pip uninstall other",
    ]
    assert lines[-1] == "1 problem"


def test_a_runtime_that_fails_in_another_way(monkeypatch):
    def crash():
        raise OSError("libstdc++.so.6: version not found")

    monkeypatch.setattr(doctor, "require_onnxruntime", crash)
    first = next(iter(doctor.diagnose()))
    assert first.level == "problem"
    assert first.text == "ONNX Runtime cannot be imported: OSError: libstdc++.so.6: version not found"


def test_a_provider_that_does_not_start():
    """As CUDA on a machine without a driver; the CPU provider must work."""
    found = OnnxRuntime("onnxruntime-gpu", "1.31.1", ("NoSuchExecutionProvider", "CPUExecutionProvider"))
    other, cpu = doctor._providers(found)
    assert other.level == "note" and other.text.startswith("NoSuchExecutionProvider is built in, but does not start")
    assert (cpu.level, cpu.text) == ("ok", "CPUExecutionProvider works")


def test_a_cpu_provider_that_does_not_work(monkeypatch):
    monkeypatch.setattr(doctor, "_starts", lambda name: "1 + 1 is [3.0]")
    (finding,) = doctor._providers(OnnxRuntime("onnxruntime", "1.31.1", ("CPUExecutionProvider",)))
    assert finding.level == "problem" and finding.text == "CPUExecutionProvider does not work: 1 + 1 is [3.0]"
    assert finding.remedies == ("pip install --force-reinstall --no-deps onnxruntime==1.31.1",)


def test_a_provider_whose_libraries_are_of_another_version(monkeypatch):
    monkeypatch.setattr(doctor, "_starts", lambda name: "the session runs on CPUExecutionProvider")
    monkeypatch.setattr("torch.version.cuda", "12.8")
    monkeypatch.setattr("onnxruntime.cuda_version", "13.0", raising=False)
    (finding,) = doctor._providers(OnnxRuntime("onnxruntime-gpu", "1.31.1", ("CUDAExecutionProvider",)))
    assert finding.level == "note"
    assert "does not start here: the session runs on CPUExecutionProvider; this ONNX Runtime" in finding.text
    assert "is built for CUDA 13.0, and finds only the libraries of CUDA 12.8" in finding.text


def test_a_gpu_that_onnxruntime_does_not_reach(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    *_, finding = doctor._providers(OnnxRuntime("onnxruntime", "1.31.1", ("CPUExecutionProvider",)))
    assert finding.level == "note" and "torch sees a GPU, but onnxruntime is a build without CUDA" in finding.text
    assert finding.remedies == ("pip uninstall --yes onnxruntime && pip install onnxruntime-gpu",)


def requirements(monkeypatch, *listed: str) -> list[doctor.Finding]:
    original = importlib.metadata.requires
    monkeypatch.setattr(
        importlib.metadata,
        "requires",
        lambda name: list(listed) if name == "lightning-ort" else original(name),
    )
    return list(doctor._requirements())


def test_requirements_that_are_met(monkeypatch):
    assert requirements(monkeypatch, "torch>=2.9", "jsonargparse[signatures]>=4; extra == 'cli'", "numpy") == []


def test_requirements_that_are_not_met(monkeypatch):
    missing, old = requirements(
        monkeypatch, "no-such-package>=3", "torch>=99", "onnxruntime>=99", "no-such-thing; extra == 'test'"
    )
    assert (missing.level, missing.text) == ("problem", "no-such-package is missing: lightning_ort needs it")
    assert missing.remedies == ('pip install "no-such-package>=3"',)
    assert old.level == "problem" and old.text.endswith("is not >=99: lightning_ort needs it")
    assert old.remedies == ('pip install "torch>=99" --upgrade',)


def test_what_the_command_line_needs_is_a_note(monkeypatch):
    (missing,) = requirements(monkeypatch, "no-such-parser[signatures]>=4; extra == 'cli'")
    assert missing.level == "note" and "no-such-parser is missing: lightning-ort fit, validate" in missing.text
    assert missing.remedies == ('pip install "no-such-parser[signatures]>=4"',)


def test_what_an_extra_of_a_requirement_needs(monkeypatch):
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "docstring-parser" else version(name))
    (finding,) = requirements(monkeypatch, "jsonargparse[signatures]>=4; extra == 'cli'")
    assert finding.level == "note" and "docstring-parser of jsonargparse[signatures]>=4 is missing" in finding.text


def test_sources_without_metadata(monkeypatch):
    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", unknown)
    (finding,) = doctor._requirements()
    assert finding.level == "note" and "requirements not checked" in finding.text


WITHOUT = """
import lightning_ort
from lightning_ort.cli import main
try:
    lightning_ort.ORTStrategy()
except ImportError as error:
    print(type(error).__name__)
print(main(["doctor"]), main(["fit", "--config=no.yaml"]))
"""


@pytest.mark.either_build
def test_without_onnxruntime(tmp_path):
    """All packages but ONNX Runtime: the package is imported, and says what to install."""
    site = tmp_path / "site"
    site.mkdir()
    for folder in (Path(p) for p in sys.path if p.endswith("site-packages")):
        for entry in folder.iterdir():
            if not entry.name.startswith("onnxruntime") and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    run = subprocess.run(
        [sys.executable, "-S", "-W", "ignore", "-c", WITHOUT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == "OnnxRuntimeNotFoundError"
    assert any(line.startswith("problem  lightning_ort needs ONNX Runtime 1.19 or later") for line in lines)
    assert '         -> pip install "onnxruntime>=1.19"' in lines
    assert lines[-2:] == ["1 problem", "1 2"]
    assert f"needs ONNX Runtime {environment.MINIMUM_VERSION} or later, but none" in run.stderr
    assert "See also: lightning-ort doctor" in run.stderr


@pytest.mark.either_build
def test_two_processes_meet(capsys, monkeypatch):
    assert doctor.meet() is None
    # one that gloo cannot use ends both at once
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert main(["doctor"]) == 0
    printed = listing(capsys)
    assert "ok       torch.distributed has gloo" in printed
    line = next(line for line in printed.splitlines() if "do not find each other" in line)
    assert line.startswith("note") and "nowhere0" in line
    assert line.endswith("GLOO_SOCKET_IFNAME=nowhere0, but there is no network interface nowhere0")
    assert "         -> unset GLOO_SOCKET_IFNAME\n" in printed


def test_names_that_do_not_resolve(capsys, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "unheard-of.invalid")
    assert main(["doctor"]) == 0
    printed = listing(capsys)
    assert "ok       two processes of this machine train together\n" in printed
    assert "note     MASTER_ADDR=nowhere.invalid is the name of no machine" in printed
    assert "note     the name of this machine, unheard-of.invalid, does not resolve" in printed


def test_what_keeps_processes_from_each_other_is_said(monkeypatch):
    monkeypatch.setattr(doctor, "meet", lambda: "Connection refused")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    (found,) = (f for f in doctor.diagnose() if "devices=2" in f.text)
    assert found.level == "note" and found.text.endswith("devices=2 does not work: Connection refused")
    assert "export GLOO_SOCKET_IFNAME=lo" in found.remedies
    assert all(" " not in remedy.partition("=")[2] and "|" not in remedy for remedy in found.remedies)
