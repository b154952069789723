"""OpenVINO, which computes float32 graphs in bfloat16 where the CPU has instructions for that."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from lightning_ort.runtime.providers.provider import Provider

__all__ = ["OPENVINO"]

_HINT = "INFERENCE_PRECISION_HINT"


class _OpenVINO(Provider):
    reads_in_place = True

    def options_in_bfloat16(self, given: Mapping[str, str]) -> dict[str, str] | None:
        """What the user wrote into ``load_config`` stays."""
        if not given.get("device_type", "CPU").startswith("CPU") or not _cpu_has_bfloat16():
            return None
        config = json.loads(given.get("load_config", "{}"))
        config.setdefault("CPU", {}).setdefault(_HINT, "bf16")
        return {**given, "load_config": json.dumps(config)}


OPENVINO = _OpenVINO("OpenVINOExecutionProvider")


def _cpu_has_bfloat16() -> bool:
    # torch tells this only here; without it, float32 is the faster one
    return any(getattr(torch.cpu, name, bool)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
