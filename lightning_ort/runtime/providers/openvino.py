"""Which provider computes in bfloat16, and binding of bfloat16 tensors, which numpy has no type for."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime
import torch
from onnxruntime.capi import _pybind_state

from lightning_ort.errors import ProviderError
from lightning_ort.runtime.memory import address_of
from lightning_ort.runtime.providers import check_available
from lightning_ort.runtime.tensors import ONNX

__all__ = ["bind_bfloat16", "options_for_bfloat16"]

_OPENVINO, _HINT = "OpenVINOExecutionProvider", "INFERENCE_PRECISION_HINT"


def options_for_bfloat16(
    providers: Sequence[str] | None,
    provider_options: Sequence[Mapping[str, Any]] | Mapping[str, Mapping[str, Any]] | None,
) -> dict[str, dict[str, str]] | None:
    """Options with which float32 graphs are computed in bfloat16, or ``None`` where nothing does that faster.

    OpenVINO does on a CPU that has instructions for it; what the user wrote into its ``load_config`` stays.
    """
    if not providers or providers[0] != _OPENVINO or not _cpu_has_bfloat16():
        return None
    options = check_available(providers, provider_options)
    mine = options[_OPENVINO]
    if not mine.get("device_type", "CPU").startswith("CPU"):
        return None
    config = json.loads(mine.get("load_config", "{}"))
    config.setdefault("CPU", {}).setdefault(_HINT, "bf16")
    return {**options, _OPENVINO: {**mine, "load_config": json.dumps(config)}}


def _cpu_has_bfloat16() -> bool:
    # torch tells this only here; without it, float32 is the faster one
    return any(getattr(torch.cpu, name, bool)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))


def bind_bfloat16(bind: Any, name: str, device: tuple[str, int], tensor: torch.Tensor) -> None:
    """Bind the contiguous ``tensor`` by address.

    Args:
        bind: ``bind_input`` or ``bind_output`` of an ``onnxruntime.IOBinding``.
        name: of the graph's input or output.
        device: type and index, as ONNX Runtime has them.
        tensor: of bfloat16.

    Raises:
        ProviderError: this ONNX Runtime takes bfloat16 in no way.
    """
    try:
        bind(name, *device, int(ONNX[torch.bfloat16]), tuple(tensor.shape), address_of(tensor))
    except RuntimeError:
        # before 1.20 only numpy's types were known, and no other way is public
        by_value = getattr(bind.__self__, f"{bind.__name__.replace('bind_', 'bind_ortvalue_')}")
        by_value(name, _ort_value(tensor))


def _ort_value(tensor: torch.Tensor) -> onnxruntime.OrtValue:
    """``tensor`` as ONNX Runtime's own kind of tensor, in the same memory."""
    make = getattr(_pybind_state.OrtValue, "from_dlpack", None)
    if make is None:
        raise ProviderError(
            f"ONNX Runtime {onnxruntime.__version__} cannot be given bfloat16 tensors: expected one with DLPack (the "
            "training builds have it) or 1.20 and later. Install one of these, or use precision='16-mixed'."
        )
    if tensor.device.type == "cpu" and tensor.numel():
        # bound by address like all others, without a hold on the memory: nobody could tell when it is free again
        memory = (ctypes.c_char * (2 * tensor.numel())).from_address(tensor.data_ptr())
        tensor = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    return onnxruntime.OrtValue(make(torch.utils.dlpack.to_dlpack(tensor.detach()), False))
