"""The layout of the package: who may import whom, and the paths of earlier versions."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import networkx
import pytest

import lightning_ort
from lightning_ort._moved import MOVED

pytestmark = pytest.mark.stock_only

ROOT = Path(lightning_ort.__file__).parent
FILES = {
    ".".join(p.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): p for p in ROOT.rglob("*.py")
}
# from the ground to the roof; rooms of one line know nothing of each other
FLOORS = [
    {"_version", "errors", "environment", "validation", "_moved", "lightning_packages"},
    {"files", "amp", "runtime", "distributed"},
    {"verification", "onnx_reader", "report"},
    {"compiler"},
    {"optim"},
    {"checkpoints", "export"},
    {"trainer", "training_session"},
    {"ondevice"},
    {"lightning", "ort_trainer", "artifacts", "experimental"},
    {"checkpoint", "bench"},
    {"cli"},
    {"__main__"},
]


def imports(path: Path) -> set[str]:
    """Modules of this package that a file imports when it runs, wherever in it."""
    found = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "lightning_ort":
                for alias in child.names:
                    name = f"{child.module}.{alias.name}"
                    found.add(name if name in FILES else str(child.module))
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def room_of(name: str) -> str:
    """What stands behind the name of the package."""
    return [*name.split("."), ""][1]


def test_that_no_files_import_each_other():
    graph = networkx.DiGraph((name, other) for name, path in FILES.items() for other in imports(path))
    circles = [sorted(c) for c in networkx.strongly_connected_components(graph) if len(c) > 1]
    assert not circles


def test_that_rooms_import_downwards():
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    upwards = []
    for name, path in FILES.items():
        room = room_of(name)
        for other in imports(path) if room else ():
            target = room_of(other)
            if target and target != room and floor[target] >= floor[room]:
                upwards.append(f"{name} -> {other}")
    assert not upwards


def test_that_execution_providers_are_named_in_their_own_files_only():
    naming = [
        name
        for name, path in FILES.items()
        if re.search(r"\w+ExecutionProvider", path.read_text())
        and not name.startswith("lightning_ort.runtime.providers.")
    ]
    assert not naming


def test_that_one_file_exports_by_torch_and_none_by_its_deprecated_exporter():
    exporting = [name for name, path in FILES.items() if re.search(r"torch\.onnx\.export\(", path.read_text())]
    assert exporting == ["lightning_ort.export.graph"]
    deprecated = re.compile(r"dynamo\s*=\s*False|TrainingMode|torch\.onnx\.utils|torch\.jit\.(trace|script)")
    assert [name for name, path in FILES.items() if deprecated.search(path.read_text())] == []


def offered(path: Path) -> set[str]:
    """Functions and constants that a file has in ``__all__``; a class may be what a function returns."""
    names: set[str] = set()
    bound: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            bound.add(node.name)
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if ast.unparse(target or ast.Tuple([])) == "__all__":
                names = set(ast.literal_eval(node.value))
            bound.update(name.id for name in ast.walk(target or ast.Tuple([])) if isinstance(name, ast.Name))
    return names & bound


def test_that_functions_and_constants_are_offered_only_where_somebody_takes_them():
    root = ROOT.parent
    paths = {*FILES.values(), *root.glob("docs/reference/*.md")}
    paths.update(path for folder in ("tests", "benchmarks", "examples") for path in (root / folder).rglob("*.py"))
    words = {path: set(re.findall(r"\w+", path.read_text())) for path in paths}
    for_nobody = [
        f"{module}.{name}"
        for module, path in FILES.items()
        if path.name != "__init__.py"
        for name in offered(path)
        if not any(name in found for other, found in words.items() if other != path)
    ]
    assert not for_nobody


@pytest.mark.parametrize("old", MOVED)
def test_paths_of_earlier_versions(old):
    with pytest.warns(FutureWarning, match=f"lightning_ort.{old} is now lightning_ort.{MOVED[old]}"):
        module = importlib.import_module(f"lightning_ort.{old}")
    new = importlib.import_module(f"lightning_ort.{MOVED[old]}")
    names = [name for name in new.__all__ if hasattr(new, name)]
    assert names
    assert all(getattr(module, name) is getattr(new, name) for name in names)


GUIDES = [
    ROOT.parent / "CONTRIBUTING.md",
    ROOT.parent / "docs" / "contributing" / "layout.md",
    *ROOT.rglob("README.md"),
]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda p: p.relative_to(ROOT.parent).as_posix())
def test_guides_name_files_that_exist(guide):
    named = [re.sub(r"<\w+>", "*", path) for path in re.findall(r"`([\w./<>]+/[\w./<>]*)`", guide.read_text())]
    missing = [n for n in named if not any([*ROOT.parent.glob(n), *ROOT.rglob(n), *ROOT.rglob(f"{n}.py")])]
    assert not missing
