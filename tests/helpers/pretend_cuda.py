"""Traces steps as on a GPU, on machines without one and with the CPU build of torch.

Which operators torch composes a call of depends on the device: dropout, attention, normalization and recurrent layers
go other ways for CUDA tensors. Fake tensors may claim to be on such a device anywhere, but autograd asks the CUDA part
of torch about it, and in the CPU build what stands in for that part ends the process. :func:`hooks` puts own answers in
its place, found by the order of the virtual functions in torch's headers.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler import compilation, trace
from lightning_ort.compiler.trace import Traced
from lightning_ort.compiler.trace_cache import TRACES

__all__ = ["cuda_traces", "hooks", "possible"]

possible = sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8
_ROOT = Path(torch.__file__).parent
_CUDA, _META = 1, 14  # of c10::DeviceType
# functions that return a number, as machine code; at zero in the register for fractions, too
_CODE = {
    "x86_64": lambda n: b"\x31\xd2\x0f\x57\xc0\xb8" + n.to_bytes(4, "little") + b"\xc3",
    "aarch64": lambda n: b"".join(
        i.to_bytes(4, "little") for i in (0x52800000 | (n & 0xFFFF) << 5, 0xD2800001, 0x9E6703E0, 0xD65F03C0)
    ),
}
# these make tensors on the CPU where a step on a GPU would have named its device
_MAKE = {
    torch.arange,
    torch.empty,
    torch.eye,
    torch.full,
    torch.linspace,
    torch.ones,
    torch.rand,
    torch.randn,
    torch.zeros,
}


def _virtual_functions(*headers: str) -> list[str]:
    """Names in the order of the table of the class that the last header declares."""
    names = []
    for header in headers:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", (_ROOT / "include" / header).read_text(), flags=re.DOTALL)
        names += re.findall(r"virtual\s[^;{}]*?[\s*&](\w+)\s*\(", text)
    return names


class _Answers:
    """A copy of a table of virtual functions in which some return given numbers."""

    def __init__(self, table: int, names: Sequence[str], answers: dict[str, int]) -> None:
        import platform

        self._code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._code))
        self._table = (ctypes.c_void_p * len(names)).from_buffer_copy(ctypes.string_at(table, 8 * len(names)))
        for name, number in answers.items():
            self._table[names.index(name)] = start + self._code.tell()
            self._code.write(_CODE[platform.machine()](number))
        self.address = ctypes.addressof(self._table)
        self._object = ctypes.c_void_p(self.address)
        self.object = ctypes.addressof(self._object)


@contextlib.contextmanager
def hooks() -> Iterator[None]:
    """Let autograd meet fake CUDA tensors, and torch choose operators as its CUDA build with cuDNN does."""
    if torch.backends.cuda.is_built():
        yield
        return
    c10, cpu = (ctypes.CDLL(str(_ROOT / "lib" / name)) for name in ("libc10.so", "libtorch_cpu.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    of_meta = ctypes.c_void_p.from_address(guards[_META]).value
    on_device = (
        "type",
        "exchangeDevice",
        "getDevice",
        "getStream",
        "getDefaultStream",
        "getNewStream",
        "exchangeStream",
    )
    guard = _Answers(
        of_meta,
        _virtual_functions("c10/core/impl/DeviceGuardImplInterface.h"),
        dict.fromkeys(on_device, _CUDA) | {"record": 0, "block": 0},
    )
    cpu._ZN2at6detail12getCUDAHooksEv.restype = ctypes.c_void_p
    present = ctypes.c_void_p.from_address(cpu._ZN2at6detail12getCUDAHooksEv())
    before = present.value
    destructors = ["", ""]
    answers = _Answers(
        before,
        destructors + _virtual_functions("ATen/detail/AcceleratorHooksInterface.h", "ATen/detail/CUDAHooksInterface.h"),
        {
            "isBuilt": 1, "hasCUDA": 1, "hasPrimaryContext": 0, "compiledWithCuDNN": 1, "hasCuDNN": 1,
            "versionCuDNN": 91000, "versionRuntimeCuDNN": 91000, "batchnormMinEpsilonCuDNN": 0,
            "supportsDilatedConvolutionWithCuDNN": 1, "supportsDepthwiseConvolutionWithCuDNN": 1,
            "supportsBFloat16ConvolutionWithCuDNNv8": 1, "supportsBFloat16RNNWithCuDNN": 1,
        },
    )  # fmt: skip
    guards[_CUDA], present.value = guard.object, answers.address
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        guards[_CUDA], present.value = None, before


@contextlib.contextmanager
def cuda_traces(seen: list[Traced] | None = None) -> Iterator[list[Traced]]:
    """Regions are traced as if all their tensors were on a GPU, and then executed on the CPU, where they are.

    Yields:
        what was traced, in order.
    """
    found: list[Traced] = [] if seen is None else seen
    real_trace, real_tangents = compilation.trace, trace._tangents

    def traced(graph: fx.GraphModule, fakes: Sequence[Any], *args: Any, **kwargs: Any) -> Traced:
        with hooks():
            found.append(real_trace(_elsewhere(graph), [_moved(x) for x in fakes], *args, **kwargs))
        return found[-1]

    compilation.trace, trace._tangents = traced, lambda *args: [_moved(t) for t in real_tangents(*args)]
    TRACES.clear()
    try:
        yield found
    finally:
        compilation.trace, trace._tangents = real_trace, real_tangents
        TRACES.clear()


def _moved(x: Any) -> Any:
    """A fake tensor like ``x`` on a GPU; Python numbers stay on the CPU there, too."""
    if not isinstance(x, torch.Tensor) or getattr(x, "item_memo", None) is not None:
        return x
    with x.fake_mode:
        y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    return y.requires_grad_(x.requires_grad)


def _elsewhere(graph: fx.GraphModule) -> fx.GraphModule:
    """``graph`` making its tensors on a GPU."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph.graph, {}))

    def moved(argument: Any) -> Any:
        named = isinstance(argument, torch.device) or argument == "cpu"
        return torch.device("cuda", 0) if named else argument

    for node in copy.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), moved)
        if node.target in _MAKE:
            node.kwargs = {"device": torch.device("cuda", 0), **node.kwargs}
    return fx.GraphModule(graph, copy)
