"""What to feed where: the description of the portable files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from lightning_ort.checkpoints.portable import DTYPES, dtype_name
from lightning_ort.checkpoints.state import TrainingState
from lightning_ort.compiler.aot.inputs import InputInfo
from lightning_ort.compiler.aot.step_graph import StepGraph
from lightning_ort.errors import DamagedFileError
from lightning_ort.files.onnx_files import read_onnx_checked
from lightning_ort.files.reading import refusing
from lightning_ort.ondevice.optimizer_config import OptimizerConfig
from lightning_ort.runtime.tensors import ONNX

__all__ = ["FORMAT", "VERSION", "Manifest", "manifest_of"]

FORMAT, VERSION = "lightning_ort.ondevice.formats.portable", 1
SUFFIX = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A manifest file and what it says."""

    path: Path
    content: Mapping[str, Any]

    def step_graph(self, kind: str, state: TrainingState) -> StepGraph:
        """The graph of that kind.

        Raises:
            FileNotFoundError: its file is missing.
            ValueError: there is none, the file is damaged, or file, manifest and ``state`` do not fit each other.
        """
        self._check_state(state)
        entry = self._graph(kind)
        path = self.path.parent / entry["file"]
        model, checksum = _load(path)
        for what, values in (("inputs", model.graph.inputs), ("outputs", model.graph.outputs)):
            described = {e["name"]: e for e in entry[what]}
            found = {str(v.name): v for v in values}
            different = sorted(set(described) ^ set(found))
            different = different or [n for n, v in found.items() if not _fits(v, described[n])]
            if different:
                raise ValueError(
                    f"{str(self.path)!r} does not describe {path.name}: they differ in the {what} "
                    f"{', '.join(map(repr, different))}."
                )
        self._check_file(entry, path, checksum)
        inputs = [e for e in entry["inputs"] if e["role"] == "input"]
        infos = tuple(InputInfo(e["name"], DTYPES[e["dtype"]], tuple(e["shape"])) for e in inputs)
        tensors = {e["name"]: e["name"] for e in entry["inputs"] if e["role"] in ("parameter", "buffer")}
        unknown = sorted(set(tensors.values()) - set(state.tensors))
        if unknown:
            raise ValueError(f"{path.name} reads {', '.join(map(repr, unknown))}, which the checkpoint lacks.")
        outputs = entry["outputs"]
        return StepGraph(
            model,
            infos,
            tuple(e["name"] for e in outputs if e["role"] in ("loss", "output")),
            tensors,
            {e["of"]: e["name"] for e in outputs if e["role"] == "gradient"},
            {e["feeds"]: e["name"] for e in outputs if e["role"] == "buffer"},
        )

    def optimizer(self) -> OptimizerConfig:
        """The optimizer.

        Raises:
            ValueError: there is none, or it is not a possible one.
        """
        given = self.content["optimizer"]
        if given is None:
            raise ValueError(f"The artifacts of {str(self.path)!r} were made without an optimizer.")
        known = {f.name for f in dataclasses.fields(OptimizerConfig)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise ValueError(f"{str(self.path)!r}: the optimizer has unknown settings {', '.join(unknown)}.")
        values: dict[str, Any] = {k: tuple(v) if k == "betas" else v for k, v in given.items()}
        values |= {k: float(v) for k, v in values.items() if v in ("inf", "-inf")}
        config = OptimizerConfig(**values)
        entry = self._graph("train_step")
        path = self.path.parent / entry["file"]
        model, checksum = _load(path)
        noted = model.metadata_props.get(FORMAT)
        if noted != json.dumps(given, sort_keys=True):
            raise ValueError(f"{str(self.path)!r} does not describe {path.name}: they differ in the optimizer.")
        self._check_file(entry, path, checksum)
        return config

    def _check_file(self, entry: Mapping[str, Any], path: Path, checksum: int) -> None:
        """That a file is the one that was written with the manifest; older manifests do not say."""
        if entry.get("crc32", checksum) != checksum:
            raise DamagedFileError(
                f"{str(path)!r} is damaged, was changed, or is of other artifacts than {self.path.name}: its checksum "
                "is another."
            )

    def _graph(self, kind: str) -> Mapping[str, Any]:
        graphs = self.content["graphs"]
        if kind not in graphs:
            raise ValueError(f"{str(self.path)!r} lists no graph {kind!r}. It lists: {', '.join(graphs)}.")
        return graphs[kind]

    def _check_state(self, state: TrainingState) -> None:
        described = {e["name"]: e for e in self.content["parameters"]}
        trained = tuple(n for n, e in described.items() if e["trained"])
        buffers = {e["name"]: e for e in self.content["buffers"]}
        for what, entries, tensors in (
            ("parameters", described, state.parameters),
            ("buffers", buffers, state.buffers),
        ):
            wrong = sorted(set(entries) ^ set(tensors))
            wrong = wrong or [
                n
                for n, t in tensors.items()
                if list(t.shape) != entries[n]["shape"] or dtype_name(t.dtype) != entries[n]["dtype"]
            ]
            if wrong:
                raise ValueError(
                    f"The checkpoint does not belong to {str(self.path)!r}: they differ in the {what} "
                    f"{', '.join(map(repr, wrong))}."
                )
        if trained != state.trained:
            differ = sorted(set(trained) ^ set(state.trained)) or list(state.trained)
            raise ValueError(
                f"The checkpoint does not belong to {str(self.path)!r}: they differ in what is trained "
                f"({', '.join(differ)})."
            )


def manifest_of(path: Path) -> Manifest | None:
    """The manifest that lists the artifact ``path``, or of the folder ``path``; ``None`` if there is none.

    Raises:
        ValueError: a manifest is damaged.
    """
    folder = path if path.is_dir() else path.parent
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        with refusing(repr(str(file)), "no manifest of artifacts, or a damaged one"):
            content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            continue
        _check(content, file)
        files = {graph["file"] for graph in content["graphs"].values()}
        if path in (folder, file) or path.name in files:
            return Manifest(file, content)
    return None


def _check(content: Mapping[str, Any], file: Path) -> None:
    """That everything is there that is read."""
    if content.get("version") != VERSION:
        raise ValueError(f"{str(file)!r} has version {content.get('version')!r}; expected {VERSION}.")
    with refusing(repr(str(file)), "no complete manifest of artifacts"):
        for entry in [*content["parameters"], *content["buffers"]]:
            assert entry["dtype"] in DTYPES and isinstance(entry["shape"], list) and entry["name"]
        for entry in content["parameters"]:
            assert isinstance(entry["trained"], bool)
        for graph in content["graphs"].values():
            # a file beside the manifest, nowhere else
            assert Path(graph["file"]).name == graph["file"]
            for entry in [*graph["inputs"], *graph["outputs"]]:
                assert entry["dtype"] in DTYPES and isinstance(entry["shape"], list) and entry["name"]
                assert isinstance(entry["role"], str)
                needed = {"gradient": "of", "buffer": "feeds"}.get(entry["role"])
                assert entry in graph["inputs"] or needed is None or needed in entry
        assert content["optimizer"] is None or isinstance(content["optimizer"], dict)


def _load(path: Path) -> tuple[ir.Model, int]:
    """A graph, and the checksum of its file."""
    if not path.is_file():
        raise FileNotFoundError(f"The artifact {str(path)!r} is missing.")
    proto, checksum = read_onnx_checked(path)
    with refusing(repr(str(path)), "no ONNX model, or a damaged one"):
        return ir.from_proto(proto), checksum


def _fits(value: ir.Value, entry: Mapping[str, Any]) -> bool:
    shape = None if value.shape is None else [s if isinstance(s, int) else s.value for s in value.shape]
    return value.dtype == ONNX[DTYPES[entry["dtype"]]] and shape == entry["shape"]
