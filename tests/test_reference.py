"""The reference of public names, which Sphinx makes of docstrings in `make docs`."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from lightning_ort.lightning_packages import Variant

pytestmark = pytest.mark.stock_only

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {p.relative_to(DOCS).with_suffix("").as_posix(): p.read_text() for p in DOCS.rglob("*.md")}
DIRECTIVES = re.findall(
    r"^\.\. (auto\w+):: ([\w.]+)\n((?:   :.*\n)*)",
    "".join(PAGES[name] for name in PAGES if name.startswith("reference/")),
    re.M,
)
MODULES = [name for kind, name, _ in DIRECTIVES if kind == "automodule"]


def test_every_page_is_in_the_index():
    listed = re.findall(r"^[a-z][\w/-]*$", PAGES["index"], re.M)
    assert sorted(listed) == sorted(set(PAGES) - {"index"})


def test_packages_that_users_import_have_a_page():
    expected = [
        "lightning_ort", "lightning_ort.amp", "lightning_ort.artifacts", "lightning_ort.checkpoint",
        "lightning_ort.cli", "lightning_ort.experimental", "lightning_ort.ondevice",
        "lightning_ort.ondevice.onnxblock", "lightning_ort.ondevice.onnxblock.blocks",
        "lightning_ort.ondevice.onnxblock.loss", "lightning_ort.ondevice.onnxblock.optim",
        "lightning_ort.onnx_reader", "lightning_ort.optim", "lightning_ort.ort_trainer",
    ]  # fmt: skip
    assert sorted(MODULES) == expected


def test_what_pages_leave_out_is_on_another_one():
    documented = {
        id(getattr(importlib.import_module(module), name))
        for kind, module, options in DIRECTIVES
        if kind == "automodule" and ":no-members:" not in options
        for name in importlib.import_module(module).__all__
        if name not in options
    }
    for kind, name, options in DIRECTIVES:
        if options:
            module = importlib.import_module(name)
            left_out = re.findall(r":exclude-members: (.*)", options) or [", ".join(module.__all__)]
            assert kind == "automodule"
            assert all(id(getattr(module, n)) in documented for n in left_out[0].split(", ")), name


@pytest.mark.parametrize("name", MODULES)
def test_public_names_have_docstrings(name):
    module = importlib.import_module(name)
    assert module.__doc__
    bare = []
    for public in module.__all__:
        value = getattr(module, public)
        if isinstance(value, (str, ModuleType)):
            continue
        if not value.__doc__:
            bare.append(public)
        if inspect.isclass(value):
            bare += [f"{public}.{member}" for member in members_without_docstring(value)]
    assert not bare


def members_without_docstring(cls: type) -> list[str]:
    """Public methods and properties that are said nothing about, and that no class of others has."""
    others = [base for base in cls.__mro__ if not base.__module__.startswith("lightning_ort")]
    if issubclass(cls, Variant):  # instances have bases of Lightning
        others += [kind for base in cls._first_bases() for kind in base.__mro__]
    return [
        name
        for base in cls.__mro__
        if base not in others
        for name, value in vars(base).items()
        if not name.startswith("_")
        and (inspect.isroutine(value) or isinstance(value, (property, classmethod, staticmethod)))
        and not any(getattr(base.__dict__.get(name), "__doc__", None) for base in cls.__mro__)
        and not any(name in vars(base) for base in others)
    ]
