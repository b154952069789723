"""Which ONNX Runtime is installed, and whether it can be used; where libraries are."""

from __future__ import annotations

import csv
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

__all__ = [
    "LIBRARIES",
    "MINIMUM_VERSION",
    "OnnxRuntime",
    "OnnxRuntimeConflictError",
    "OnnxRuntimeImportError",
    "OnnxRuntimeNotFoundError",
    "OnnxRuntimeTooOldError",
    "has_cpp_compiler",
    "require_onnxruntime",
]

MINIMUM_VERSION = "1.19"


def _folders_of(*packages: str) -> list[str]:
    """Where packages lie, of those that are installed; they are not imported."""
    specs = [importlib.util.find_spec(name) for name in packages]
    return [folder for spec in specs if spec is not None for folder in spec.submodule_search_locations or ()]


_INSTALLED = [*site.getsitepackages(), site.getusersitepackages(), *sys.path]
_FOLDERS = [
    *(sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib")),
    *(path for path in _INSTALLED if "-packages" in os.path.basename(path)),
    str(Path(__file__).parent),
    # these may be in any folder on PYTHONPATH
    *_folders_of("torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics"),
]
LIBRARIES = tuple(dict.fromkeys(_FOLDERS))
"""Where lines are that no user has written."""

# Every one of them is imported as `onnxruntime`.
_DISTRIBUTIONS = (
    "onnxruntime",
    "onnxruntime-azure",
    "onnxruntime-cann",
    "onnxruntime-coreml",
    "onnxruntime-directml",
    "onnxruntime-gpu",
    "onnxruntime-gpu-extended",
    "onnxruntime-lite",
    "onnxruntime-migraphx",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
    "onnxruntime-rocm",
    "onnxruntime-silicon",
    "onnxruntime-training",
    "onnxruntime-training-cpu",
    "onnxruntime-training-rocm",
    "onnxruntime-vitisai",
    "onnxruntime-webgpu",
    "onnxruntime-windowsml",
    "ort-nightly",
    "ort-nightly-directml",
    "ort-nightly-gpu",
    "ort-nightly-rocm",
    "ort-training-nightly",
)


class OnnxRuntimeImportError(ImportError):
    """ONNX Runtime is installed but cannot be imported; base class of all errors about the installation.

    Attributes:
        remedies: commands of which any one mends it.
    """

    def __init__(self, message: str, remedies: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.remedies = tuple(remedies)


class OnnxRuntimeNotFoundError(OnnxRuntimeImportError):
    """No ONNX Runtime is installed."""


class OnnxRuntimeConflictError(OnnxRuntimeImportError):
    """Several ONNX Runtime distributions share one folder, or one has overwritten or removed files of another."""


class OnnxRuntimeTooOldError(OnnxRuntimeImportError):
    """The installed ONNX Runtime is older than ``MINIMUM_VERSION``."""


@dataclass(frozen=True)
class OnnxRuntime:
    """The ONNX Runtime of this environment.

    Attributes:
        distribution: The name under which it was installed, such as ``onnxruntime-gpu``; None for a build that
            carries no package metadata.
        version: ``onnxruntime.__version__``.
        providers: ``onnxruntime.get_available_providers()``, in ONNX Runtime's order of preference.
    """

    distribution: str | None
    version: str
    providers: tuple[str, ...]


@functools.cache
def require_onnxruntime() -> OnnxRuntime:
    """Return the installed ONNX Runtime after checking that it can be used.

    A success is remembered for the life of the process; after a failure the next call looks again.

    Returns:
        The name, version and execution providers of the one ONNX Runtime that is installed.

    Raises:
        OnnxRuntimeNotFoundError: There is none.
        OnnxRuntimeConflictError: There are several in one folder, or the files are not those of the distribution
            that pip believes to be installed, as after installing two and uninstalling one.
        OnnxRuntimeTooOldError: It is older than ``MINIMUM_VERSION``.
        OnnxRuntimeImportError: It fails to import for another reason.
    """
    spec = importlib.util.find_spec("onnxruntime")
    installed = _installed_in(None if spec is None else spec.submodule_search_locations)
    if len(installed) > 1:
        raise OnnxRuntimeConflictError(_describe_clash(installed), _one_of(installed))
    if spec is None or spec.origin is None:
        if installed:
            raise OnnxRuntimeConflictError(
                f"{_pinned(installed[0])} is registered as installed but its files are missing, as happens when "
                f"another ONNX Runtime is uninstalled from the same folder. {_reinstall(installed)}",
                [_command(installed)],
            )
        raise OnnxRuntimeNotFoundError(
            f"lightning_ort needs ONNX Runtime {MINIMUM_VERSION} or later, but none is installed. Install exactly one "
            f'of its distributions: pip install "onnxruntime>={MINIMUM_VERSION}", or "onnxruntime-gpu" for GPUs.',
            [f'pip install "onnxruntime>={MINIMUM_VERSION}"', f'pip install "onnxruntime-gpu>={MINIMUM_VERSION}"'],
        )
    try:
        module = importlib.import_module("onnxruntime")
        version: str = module.__version__
        providers = tuple(module.get_available_providers())
    except (ImportError, AttributeError) as error:
        raise OnnxRuntimeImportError(
            f"ONNX Runtime is installed in {_folder(spec.origin)} but does not work: {error}. {_reinstall(installed)}",
            [_command(installed)],
        ) from error
    if installed and _release(version) != _release(installed[0].version):
        raise OnnxRuntimeConflictError(
            f"{_pinned(installed[0])} is registered as installed, but the files in {_folder(spec.origin)} are those of "
            f"version {version}: another ONNX Runtime was installed over them. {_reinstall(installed)}",
            [_command(installed)],
        )
    if Version(version) < Version(MINIMUM_VERSION):
        name = _name(installed[0]) if installed else "onnxruntime"
        command = f'pip install --upgrade "{name}>={MINIMUM_VERSION}"'
        raise OnnxRuntimeTooOldError(
            f"lightning_ort needs ONNX Runtime {MINIMUM_VERSION} or later, but {name} {version} is installed. "
            f"Upgrade it: {command}",
            [command],
        )
    return OnnxRuntime(_name(installed[0]) if installed else None, version, providers)


def _installed_in(folders: list[str] | None) -> list[importlib.metadata.Distribution]:
    """The known distributions that put their files into one of ``folders``, or anywhere if there are none."""
    found = []
    for name in _DISTRIBUTIONS:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        # Some plug-ins have such names too but install beside ONNX Runtime; conda's metadata list no files. From Python
        # 3.12 on, .files leaves out those that are missing.
        record = distribution.read_text("RECORD")
        rows = csv.reader((record or "").splitlines())
        if record is not None and not any(row[:1] == ["onnxruntime/__init__.py"] for row in rows):
            continue
        folder = Path(str(distribution.locate_file("onnxruntime"))).resolve()
        if not folders or folder in [Path(each).resolve() for each in folders]:
            found.append(distribution)
    return found


def _describe_clash(installed: list[importlib.metadata.Distribution]) -> str:
    names = [_name(distribution) for distribution in installed]
    return (
        f"{len(installed)} ONNX Runtime distributions are installed: {', '.join(map(_pinned, installed))}. They use "
        f"the same folder, {installed[0].locate_file('onnxruntime')}, and overwrite each other's files. Remove all of "
        f"them: pip uninstall --yes {' '.join(names)}; then install the one you want: "
        + " or ".join(f"pip install --force-reinstall --no-deps {_pinned(each)}" for each in installed)
    )


def _one_of(installed: list[importlib.metadata.Distribution]) -> list[str]:
    """Per distribution the command that leaves it alone."""
    removal = f"pip uninstall --yes {' '.join(map(_name, installed))}"
    return [f"{removal} && {_command([each])}" for each in installed]


def _command(installed: list[importlib.metadata.Distribution]) -> str:
    what = _pinned(installed[0]) if installed else "onnxruntime"
    return f"pip install --force-reinstall --no-deps {what}"


def _reinstall(installed: list[importlib.metadata.Distribution]) -> str:
    return f"Install it afresh: {_command(installed)}"


def _name(distribution: importlib.metadata.Distribution) -> str:
    return distribution.metadata["Name"]


def _pinned(distribution: importlib.metadata.Distribution) -> str:
    return f"{_name(distribution)}=={distribution.version}"


def _folder(origin: str) -> Path:
    return Path(origin).parent


def _release(version: str) -> tuple[int, ...]:
    """The part of a version that metadata and module share: builds differ in what they append to it."""
    return Version(version).release[:3]


@functools.cache
def has_cpp_compiler() -> bool:
    """Whether there is a C++ compiler that inductor can use."""
    # it has no public name; imported late because it takes a second
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except (InvalidCxxCompiler, RuntimeError, OSError):
        return False
