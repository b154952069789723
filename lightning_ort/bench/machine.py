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


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor()


def _installed_versions() -> dict[str, str]:
    """Of Python, Lightning, torch and every ONNX Runtime, without importing them."""
    wanted = ("lightning", "lightning-ort", "torch")
    found = {d.name: d.version for d in distributions() if d.name in wanted or d.name.startswith("onnxruntime")}
    return {"python": platform.python_version(), **dict(sorted(found.items()))}
