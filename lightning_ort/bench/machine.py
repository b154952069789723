"""What the figures were measured on."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

__all__ = ["described"]


def described(**settings: Any) -> dict[str, Any]:
    """Beginning of a report: the date, the machine, the versions and ``settings``; its ``results`` are still empty."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": _describe_machine(),
        "versions": _installed_versions(),
        "settings": settings,
        "results": [],
    }


def _describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, GPU, load and whatever is set that steers thread pools."""
    import torch

    memory = Path("/proc/meminfo")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(int(memory.read_text().split()[1]) / 1024**2, 1) if memory.exists() else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "environment": {
            k: v for k, v in os.environ.items() if k.startswith(("OMP_", "GOMP_", "KMP_", "MKL_", "ATEN_"))
        },
    }


_INSTRUCTIONS = {"amx_tile": "AMX", "avx512_bf16": "AVX-512 BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
"""What says most about the speed of a processor of x86, above all in 16 bits: the best first."""


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = (line.partition(":") for line in (info.read_text().splitlines() if info.exists() else []))
    told = {key.strip(): value.strip() for key, _, value in lines}
    name, flags = told.get("model name") or platform.processor(), told.get("flags", "").split()
    best = next((text for flag, text in _INSTRUCTIONS.items() if flag in flags), None)
    return f"{name} ({best})" if best else name


def _installed_versions() -> dict[str, str]:
    """Of Python, Lightning, torch and every ONNX Runtime, without importing them."""
    wanted = ("lightning", "lightning-ort", "torch")
    found = {d.name: d.version for d in distributions() if d.name in wanted or d.name.startswith("onnxruntime")}
    return {"python": platform.python_version(), **dict(sorted(found.items()))}
