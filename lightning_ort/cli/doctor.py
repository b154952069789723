"""``lightning-ort doctor``: what of the installation is missing, too old or in conflict, and how to mend it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Literal

from packaging.requirements import Requirement

from lightning_ort._version import __version__
from lightning_ort.environment import OnnxRuntime, OnnxRuntimeImportError, require_onnxruntime

__all__ = ["Finding", "diagnose", "doctor", "meet"]

_DISTRIBUTION = "lightning-ort"
# installed by users as one extra, which the ONNX Runtime itself is checked for
_RUNTIMES = ("onnxruntime", "ort-")
# what others than developers have a use for
_EXTRAS = {"cli": "lightning-ort fit, validate, test, predict, examine and bench need it"}
_VERSIONS = ("torch", "lightning", "onnx", "onnx-ir", "onnxscript", "numpy", "torchmetrics", "jsonargparse")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing about the installation.

    Attributes:
        level: ``problem`` for what keeps this package from working, ``note`` for what limits it.
        text: what it is.
        remedies: commands of which any one mends it.
    """

    level: Literal["ok", "note", "problem"]
    text: str
    remedies: tuple[str, ...] = ()


def doctor(arguments: Sequence[str] = ()) -> int:
    """Print all findings.

    Args:
        arguments: of the command; there are none but ``--help``.

    Returns:
        0, or 1 if there is a problem.
    """
    argparse.ArgumentParser("lightning-ort doctor", description=__doc__, allow_abbrev=False).parse_args(arguments)
    print(f"lightning-ort {__version__}, Python {platform.python_version()} ({sys.executable}), {platform.platform()}")
    findings = list(diagnose())
    for finding in findings:
        print(f"{finding.level:<8} {finding.text}")
        for number, command in enumerate(finding.remedies):
            print(f"{'':<8} {'or' if number else '->'} {command}")
    problems = sum(f.level == "problem" for f in findings)
    print(f"{problems} problem{'s' * (problems != 1)}" if problems else "Nothing is wrong.")
    return 1 if problems else 0


def diagnose() -> Iterator[Finding]:
    """All findings, ONNX Runtime first."""
    found = None
    try:
        found = require_onnxruntime()
    except OnnxRuntimeImportError as error:
        yield Finding("problem", str(error), error.remedies)
    except Exception as error:  # a broken installation may fail in any way, and the rest is to be told all the same
        yield Finding("problem", f"ONNX Runtime cannot be imported: {type(error).__name__}: {error}")
    if found is not None:
        yield Finding("ok", f"ONNX Runtime {found.version} ({found.distribution or 'a build without metadata'})")
        try:
            yield from _providers(found)
        except ImportError as error:  # what is missing is among the requirements
            yield Finding("problem", f"Execution providers are not tried: {error}")
    try:
        yield from _processes()
    except ImportError as error:
        yield Finding("problem", f"Several processes are not tried: {error}")
    yield from _requirements()
    versions = [f"{name} {version}" for name in _VERSIONS if (version := _version(name))]
    yield Finding("ok", ", ".join(versions))


def _providers(found: OnnxRuntime) -> Iterator[Finding]:
    # ONNX Runtime's CUDA provider finds its libraries when torch has loaded them
    import torch

    from lightning_ort.runtime.providers import native_to, provider_named
    from lightning_ort.runtime.providers.cpu import CPU

    for name in found.providers:
        reason = _starts(name)
        if reason is None:
            yield Finding("ok", f"{name} works")
        elif name == CPU.name:
            yield Finding("problem", f"{name} does not work: {reason}", (_afresh(found),))
        else:
            known = provider_named(name).why_not_started()
            text = f"{name} is built in, but does not start here: {reason}"
            yield Finding("note", f"{text}; {known}" if known else text)

    if torch.cuda.is_available() and native_to(torch.device("cuda")).name not in found.providers:
        name = found.distribution or "onnxruntime"
        yield Finding(
            "note",
            f"torch sees a GPU, but {name} is a build without CUDA: strategy='ort' trains on the CPU",
            (f"pip uninstall --yes {name} && pip install onnxruntime-gpu",),
        )


def _afresh(found: OnnxRuntime) -> str:
    return f"pip install --force-reinstall --no-deps {found.distribution or 'onnxruntime'}=={found.version}"


def _starts(provider: str) -> str | None:
    """Why a session with ``provider`` cannot compute 1 + 1; ``None`` if it can."""
    import onnxruntime

    # a provider without its libraries writes there what its exception says as well
    onnxruntime.set_default_logger_severity(4)
    try:
        import numpy as np
        from onnx import TensorProto, helper

        value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
        result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
        graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "one", [value], [result])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=[provider], enable_fallback=0
        )
        if provider not in session.get_providers():
            return "the session runs on " + ", ".join(session.get_providers())
        (got,) = session.run(None, {"x": np.ones(1, np.float32)})
        return None if got.tolist() == [2.0] else f"1 + 1 is {got.tolist()}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        onnxruntime.set_default_logger_severity(2)  # its default; nothing tells what it was


def _processes() -> Iterator[Finding]:
    """Whether ``devices=2`` can work: what transports there are, and whether two processes meet by gloo."""
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding("note", "torch is built without torch.distributed: devices=2 does not work")
        return
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    has, lacks = ([name for name, is_there in there.items() if is_there is wanted] for wanted in (True, False))
    text = f"torch.distributed has {', '.join(has) or 'no transport'}"
    yield Finding("ok", f"{text}, not {', '.join(lacks)}" if lacks else text)
    if there["gloo"]:
        reason = meet()
        if reason is None:
            yield Finding("ok", "two processes of this machine train together")
        else:
            yield _do_not_meet(reason)
    host = os.environ.get("MASTER_ADDR")
    if host and not _resolves(host):
        yield Finding("note", f"MASTER_ADDR={host} is the name of no machine: no process finds rank 0 there")
    if not _resolves(socket.gethostname()):
        yield Finding(
            "note",
            f"the name of this machine, {socket.gethostname()}, does not resolve: with num_nodes=2, gloo does not know "
            "which of its addresses the others reach",
            _by_interface(_interfaces()),
        )


def _do_not_meet(reason: str) -> Finding:
    text = f"two processes of this machine do not find each other, and devices=2 does not work: {reason}"
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if not chosen:
        return Finding("note", text, _by_interface(_interfaces()))
    wrong = [name for name in chosen.split(",") if name not in _interfaces()]
    if wrong:
        text += f"; GLOO_SOCKET_IFNAME={chosen}, but there is no network interface {wrong[0]}"
    others = [name for name in _interfaces() if name != chosen]
    return Finding("note", text, ("unset GLOO_SOCKET_IFNAME", *_by_interface(others)))


def _by_interface(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"export GLOO_SOCKET_IFNAME={name}" for name in names)


def meet(seconds: float = 30.0) -> str | None:
    """Why two new processes of this machine cannot add numbers by gloo within so many seconds; ``None`` if they can."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # variables of a launcher that doctor runs under are not for these
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "lightning_ort.distributed.greeting", str(rank), str(port), str(seconds)],
            env=kept,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        until = time.monotonic() + 2 * seconds
        outputs = [p.communicate(timeout=max(0.1, until - time.monotonic()))[0] for p in processes]
    except subprocess.TimeoutExpired:
        return f"they have not ended after {2 * seconds:.0f} s"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode:
            lines = output.strip().splitlines()
            return lines[-1] if lines else f"one has ended with {process.returncode}"
    return None


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):
        return False


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _requirements() -> Iterator[Finding]:
    """What ``pip`` was told that this package needs, against what is there."""
    try:
        listed = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("note", f"{_DISTRIBUTION} is used from its sources, without metadata: requirements not checked")
        return
    for text in listed:
        requirement = Requirement(text)
        if requirement.name.startswith(_RUNTIMES):
            continue
        if _applies(requirement, ""):
            yield from _unmet(requirement, "problem", "lightning_ort needs it")
        for extra, why in _EXTRAS.items():
            if not _applies(requirement, "") and _applies(requirement, extra):
                yield from _unmet(requirement, "note", why)


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _unmet(requirement: Requirement, level: Literal["note", "problem"], why: str) -> Iterator[Finding]:
    """A finding if ``requirement``, or what its extras need, is not there."""
    wanted = str(Requirement(str(requirement).partition(";")[0].strip()))
    command = f'pip install "{wanted}"'
    version = _version(requirement.name)
    if version is None:
        yield Finding(level, f"{requirement.name} is missing: {why}", (command,))
    elif not requirement.specifier.contains(version, prereleases=True):
        yield Finding(
            level, f"{requirement.name} {version} is not {requirement.specifier}: {why}", (f"{command} --upgrade",)
        )
    else:
        own = [Requirement(text) for text in importlib.metadata.requires(requirement.name) or []]
        for extra in sorted(requirement.extras):
            parts = [r for r in own if r.marker is not None and not _applies(r, "") and _applies(r, extra)]
            missing = [r.name for r in parts if _version(r.name) is None]
            if missing:
                yield Finding(level, f"{', '.join(missing)} of {wanted} is missing: {why}", (command,))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
