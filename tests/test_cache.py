"""The folder of what later runs read: whatever is wrong with it, it is as if it were empty."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from modules import Classifier, table
from parity import fit

from lightning_ort.cli.cache import cache
from lightning_ort.files.cache import Cache, cache_folder

pytestmark = pytest.mark.stock_only


def test_without_a_home(measuring, monkeypatch, capsys):
    """Of a user whom the system does not know, as in a container."""
    for name in ("HOME", "XDG_CACHE_HOME", "LIGHTNING_ORT_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert Cache("choices").read("x") is None
    Cache("choices").write("x", {})
    assert not list(Cache("choices").entries())
    fit(Classifier, table, max_steps=2)
    assert cache([]) == 1
    assert "LIGHTNING_ORT_CACHE_DIR" in capsys.readouterr().err


def test_a_folder_in_the_home(monkeypatch):
    monkeypatch.setenv("LIGHTNING_ORT_CACHE_DIR", "~/cache")
    assert cache_folder() == Path.home() / "cache"


def test_a_size_that_is_no_number(monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_ORT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("LIGHTNING_ORT_CACHE_SIZE", "64M")
    with pytest.warns(UserWarning, match="'64M' is no whole number of bytes"):
        Cache("choices").write("x", {"a": 1})
    assert Cache("choices").read("x")["a"] == 1


def test_what_is_no_file_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_ORT_CACHE_DIR", str(tmp_path))
    (tmp_path / "choices").mkdir()
    os.mkfifo(tmp_path / "choices" / "x.json")
    assert Cache("choices").read("x") is None


@pytest.mark.parametrize(("function", "arguments"), [("scandir", []), ("unlink", ["--clear"])])
def test_a_folder_of_somebody_else(monkeypatch, tmp_path, capsys, function, arguments):
    monkeypatch.setenv("LIGHTNING_ORT_CACHE_DIR", str(tmp_path))
    Cache("choices").write("x", {"a": 1})

    def refused(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, function, refused)
    assert cache(arguments) == 1
    assert "Permission denied" in capsys.readouterr().err
    Cache("choices").write("y", {"a": 1})
    assert Cache("choices").read("y")["a"] == 1
