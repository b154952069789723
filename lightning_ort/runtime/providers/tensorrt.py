"""TensorRT, beside CUDA's provider and on its stream."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_ort.runtime.providers.cuda import OnGPU

__all__ = ["TENSORRT", "TENSORRT_RTX"]


class _TensorRT(OnGPU):
    def options(self, device: torch.device, given: Mapping[str, str], native: Mapping[str, str]) -> dict[str, str]:
        return {key: native[key] for key in ("device_id", "user_compute_stream") if key in native} | dict(given)


TENSORRT = _TensorRT("TensorrtExecutionProvider")
TENSORRT_RTX = _TensorRT("NvTensorRTRTXExecutionProvider")
