"""What is published: the files of the wheel, its metadata, and a copy that runs from where it was installed."""

from __future__ import annotations

import ast
import configparser
import email
import os
import re
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.stock_only

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "examples" / "template"
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    from hatchling import build

    folder = tmp_path_factory.mktemp("dist")
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        name = build.build_wheel(str(folder))
    finally:
        os.chdir(before)
    return zipfile.ZipFile(folder / name)


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_files_of_the_wheel(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = {p.relative_to(ROOT).as_posix() for p in (ROOT / "lightning_ort").rglob("*.py")}
    left = ("runs", "__pycache__", ".pytest_cache")
    template = {
        f"lightning_ort/_template/{p.relative_to(TEMPLATE).as_posix()}"
        for p in TEMPLATE.rglob("*")
        if p.is_file() and not set(p.relative_to(TEMPLATE).parts) & set(left)
    }
    assert "lightning_ort/_template/screening/model.py" in template
    assert package | template | {"lightning_ort/py.typed"} <= names
    others = names - package - template
    assert {n for n in others if not n.endswith((".md", ".fbs", ".html"))} == {"lightning_ort/py.typed"}


def test_metadata(metadata):
    import lightning_ort

    assert metadata["Name"] == "lightning-ort" and metadata["Version"] == lightning_ort.__version__
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert metadata["Requires-Python"] == f">={PYTHONS[0]}"
    found = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", c) for c in metadata.get_all("Classifier")]
    assert [match[1] for match in found if match] == PYTHONS
    assert {"bench", "cli", "cpu", "cuda", "stock", "template"} <= set(metadata.get_all("Provides-Extra"))
    # none is better than one of somebody else
    for url in metadata.get_all("Project-URL") or []:
        assert re.fullmatch(
            r"(Documentation|Source|Changelog|Issues), https://(?!.*(example|your|todo)).+", url.lower()
        )


def test_what_is_imported_is_what_is_asked_for(metadata):
    imported = set()
    for path in (ROOT / "lightning_ort").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    imported -= {"lightning_ort", "onnxruntime", *sys.stdlib_module_names}
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    always = {canonicalize_name(r.name) for r in required if r.marker is None}
    assert {canonicalize_name(name) for name in imported} == always


def test_entry_points(wheel):
    (name,) = (n for n in wheel.namelist() if n.endswith("entry_points.txt"))
    points = configparser.ConfigParser()
    points.read_string(wheel.read(name).decode())
    assert dict(points["console_scripts"]) == {"lightning-ort": "lightning_ort.cli:main"}
    assert dict(points["torch_dynamo_backends"]) == {"lightning_ort": "lightning_ort.compiler.backend:backend"}


def test_an_installed_copy_brings_its_template(wheel, tmp_path):
    wheel.extractall(tmp_path / "site")
    run = subprocess.run(
        [sys.executable, "-m", "lightning_ort", "new", "project"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    ours = {
        p.relative_to(tmp_path / "project"): p.read_bytes() for p in (tmp_path / "project").rglob("*") if p.is_file()
    }
    assert ours == {path: (TEMPLATE / path).read_bytes() for path in ours} and Path(".gitignore") in ours
    assert Path("tests/test_screening.py") in ours


def test_that_all_pythons_are_tested():
    matrix = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["test"]["strategy"][
        "matrix"
    ]
    assert matrix["python"] == PYTHONS and matrix["build"] == ["stock", "cpu"]
    commands = re.findall(r"^([\w -]+?):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert all(f"test-{build}" in " ".join(commands).split() for build in matrix["build"])
