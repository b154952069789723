"""Checks of the installed ONNX Runtime, on made-up installations and on the real one."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import sysconfig
from pathlib import Path
from site import getusersitepackages

import pytest
import torch

import lightning_ort
from lightning_ort import environment
from lightning_ort.environment import (
    LIBRARIES,
    OnnxRuntimeConflictError,
    OnnxRuntimeImportError,
    OnnxRuntimeNotFoundError,
    OnnxRuntimeTooOldError,
    require_onnxruntime,
)

MODULE = """
__version__ = "{version}"

def get_available_providers():
    return ["MadeUpExecutionProvider", "CPUExecutionProvider"]
"""


class SitePackages:
    """A folder on the import path that holds nothing but what a test puts there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def register(self, name: str, version: str, owns: tuple[str, ...] = ("onnxruntime/__init__.py",)) -> None:
        """Write the metadata of a distribution, as pip does."""
        folder = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / "RECORD").write_text("".join(f"{file},,\n" for file in owns))

    def write_module(self, source: str) -> None:
        """Write ``onnxruntime/__init__.py``."""
        (self.path / "onnxruntime").mkdir(parents=True, exist_ok=True)
        (self.path / "onnxruntime" / "__init__.py").write_text(source)

    def install(self, name: str, version: str) -> None:
        """Do both, overwriting the files of an earlier installation as pip would."""
        self.register(name, version)
        self.write_module(MODULE.format(version=version))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An import path without the real ONNX Runtime, which comes back after the test."""
    standard_library = [path for path in sys.path if not path.endswith(("site-packages", "dist-packages"))]
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *standard_library])
    # editable installations find their packages by hooks, and the tests need no package but onnxruntime
    for name in [name for name in sys.modules if name.partition(".")[0] == "onnxruntime"]:
        monkeypatch.delitem(sys.modules, name)
    require_onnxruntime.cache_clear()
    yield SitePackages(tmp_path / "site")
    for name in [name for name in sys.modules if name.partition(".")[0] == "onnxruntime"]:
        del sys.modules[name]
    require_onnxruntime.cache_clear()


def test_the_real_installation_passes():
    import onnxruntime

    require_onnxruntime.cache_clear()

    found = require_onnxruntime()

    assert found.version == onnxruntime.__version__
    assert found.providers == tuple(onnxruntime.get_available_providers())
    assert "CPUExecutionProvider" in found.providers
    assert found.distribution in environment._DISTRIBUTIONS
    assert importlib.metadata.version(found.distribution) == found.version


@pytest.mark.parametrize("name", environment._DISTRIBUTIONS)
def test_every_known_distribution_is_recognized(site, name):
    site.install(name, "1.20.1")

    found = require_onnxruntime()

    assert found.distribution == name
    assert found.version == "1.20.1"
    assert found.providers == ("MadeUpExecutionProvider", "CPUExecutionProvider")


def test_a_success_is_remembered(site):
    site.install("onnxruntime", "1.31.1")
    first = require_onnxruntime()
    site.register("onnxruntime-gpu", "1.31.1")

    assert require_onnxruntime() is first


def test_a_failure_is_not_remembered(site):
    with pytest.raises(OnnxRuntimeNotFoundError):
        require_onnxruntime()
    site.install("onnxruntime", "1.31.1")
    importlib.invalidate_caches()

    assert require_onnxruntime().distribution == "onnxruntime"


def test_a_build_without_metadata_is_accepted(site):
    site.write_module(MODULE.format(version="1.32.0"))

    found = require_onnxruntime()

    assert found.distribution is None
    assert found.version == "1.32.0"


@pytest.mark.parametrize(
    ("registered", "imported"),
    [("1.19.2+cu118", "1.19.2"), ("1.32.0.dev20260101001", "1.32.0"), ("1.23.2.12.9", "1.23.2")],
)
def test_what_a_build_appends_to_its_version_is_no_disagreement(site, registered, imported):
    site.register("onnxruntime-gpu", registered)
    site.write_module(MODULE.format(version=imported))

    assert require_onnxruntime().version == imported


def test_a_plug_in_beside_onnxruntime_is_no_clash(site):
    site.install("onnxruntime", "1.31.1")
    site.register("onnxruntime-qnn", "2.0.0", owns=("onnxruntime_qnn/__init__.py",))

    assert require_onnxruntime().distribution == "onnxruntime"


def test_a_distribution_in_another_folder_is_no_clash(site, tmp_path, monkeypatch):
    site.install("onnxruntime", "1.31.1")
    other = SitePackages(tmp_path / "other")
    other.install("onnxruntime-gpu", "1.20.0")
    monkeypatch.setattr(sys, "path", [*sys.path, str(other.path)])

    assert require_onnxruntime().distribution == "onnxruntime"


def test_none_installed(site):
    with pytest.raises(OnnxRuntimeNotFoundError) as raised:
        require_onnxruntime()

    assert "1.19 or later, but none is installed" in str(raised.value)
    assert 'Install exactly one of its distributions: pip install "onnxruntime>=1.19"' in str(raised.value)
    assert raised.value.remedies == ('pip install "onnxruntime>=1.19"', 'pip install "onnxruntime-gpu>=1.19"')


def test_two_installed(site):
    site.install("onnxruntime-training-cpu", "1.19.2")
    site.install("onnxruntime", "1.31.1")

    with pytest.raises(OnnxRuntimeConflictError) as raised:
        require_onnxruntime()

    message = str(raised.value)
    assert (
        "2 ONNX Runtime distributions are installed: onnxruntime==1.31.1, onnxruntime-training-cpu==1.19.2" in message
    )
    assert "overwrite each other" in message
    assert "pip uninstall --yes onnxruntime onnxruntime-training-cpu" in message
    assert "pip install --force-reinstall --no-deps onnxruntime==1.31.1" in message
    assert "pip install --force-reinstall --no-deps onnxruntime-training-cpu==1.19.2" in message
    removal = "pip uninstall --yes onnxruntime onnxruntime-training-cpu && pip install --force-reinstall --no-deps"
    assert raised.value.remedies == (f"{removal} onnxruntime==1.31.1", f"{removal} onnxruntime-training-cpu==1.19.2")


def test_files_of_another_version(site):
    site.register("onnxruntime", "1.31.1")
    site.write_module(MODULE.format(version="1.19.2"))

    with pytest.raises(OnnxRuntimeConflictError) as raised:
        require_onnxruntime()

    message = str(raised.value)
    assert "onnxruntime==1.31.1 is registered" in message
    assert "are those of version 1.19.2" in message
    (remedy,) = raised.value.remedies
    assert remedy == "pip install --force-reinstall --no-deps onnxruntime==1.31.1" and remedy in message


@pytest.mark.parametrize("remains", [(), ("capi/_pybind_state.py",)], ids=["nothing", "other files"])
def test_files_removed_by_uninstalling_another(site, remains):
    site.register("onnxruntime", "1.31.1")
    for file in remains:
        (site.path / "onnxruntime" / file).parent.mkdir(parents=True)
        (site.path / "onnxruntime" / file).touch()

    with pytest.raises(OnnxRuntimeConflictError) as raised:
        require_onnxruntime()

    assert "its files are missing" in str(raised.value)
    (remedy,) = raised.value.remedies
    assert remedy == "pip install --force-reinstall --no-deps onnxruntime==1.31.1" and remedy in str(raised.value)


def test_leftover_folder_of_an_uninstalled_distribution(site):
    (site.path / "onnxruntime" / "capi").mkdir(parents=True)

    with pytest.raises(OnnxRuntimeNotFoundError, match="none is installed"):
        require_onnxruntime()


@pytest.mark.parametrize("source", ["raise ImportError('libcudart.so.11.0: cannot open')", ""], ids=["raises", "empty"])
def test_a_module_that_does_not_work(site, source):
    site.register("onnxruntime-training", "1.19.2")
    site.write_module(source)

    with pytest.raises(OnnxRuntimeImportError) as raised:
        require_onnxruntime()

    assert "does not work" in str(raised.value)
    (remedy,) = raised.value.remedies
    assert remedy == "pip install --force-reinstall --no-deps onnxruntime-training==1.19.2"
    assert remedy in str(raised.value)
    assert str(raised.value.__cause__) in str(raised.value)


@pytest.mark.parametrize("version", ["1.18.1", "1.9.0"])
def test_too_old(site, version):
    site.install("onnxruntime-gpu", version)

    with pytest.raises(OnnxRuntimeTooOldError) as raised:
        require_onnxruntime()

    assert f"1.19 or later, but onnxruntime-gpu {version} is installed" in str(raised.value)
    assert 'pip install --upgrade "onnxruntime-gpu>=1.19"' in str(raised.value)
    assert raised.value.remedies == ('pip install --upgrade "onnxruntime-gpu>=1.19"',)


def test_every_error_is_an_import_error():
    for error in (OnnxRuntimeNotFoundError, OnnxRuntimeConflictError, OnnxRuntimeTooOldError):
        assert issubclass(error, OnnxRuntimeImportError)
    assert issubclass(OnnxRuntimeImportError, ImportError)


def test_libraries_of_users_and_of_the_system_are_no_code_of_the_user():
    """Wherever pip has put them: a virtual environment, a user's own folder, the system's."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), getusersitepackages()]
    for folder in (*folders, sysconfig.get_path("stdlib"), str(Path(lightning_ort.__file__).parent)):
        assert str(Path(folder, "library", "file.py")).startswith(LIBRARIES)
    # in a folder of its own on PYTHONPATH, too
    assert os.path.dirname(torch.__file__) in LIBRARIES
    assert not str(Path(__file__)).startswith(LIBRARIES)
